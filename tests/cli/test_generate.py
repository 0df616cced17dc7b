"""`tarnn generate`, as a user meets it."""

import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tarnn
from tarnn.data.tokenizers import train_bpe
from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.kernels.cpu import library
from tarnn.tasks.checkpoint import open_model

TARNN = Path(sys.executable).with_name("tarnn")


def stdin_of(data):
    return io.TextIOWrapper(io.BytesIO(data))


def generated(folder, prompt, tokens=30, **options):
    """The text of transformers' `generate`, greedily."""
    model, tokenizer = open_model(folder, whole=True), open_tokenizer(folder)
    ids = torch.tensor([list(prompt) or [256]])
    out = model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)[0, ids.shape[1] :]
    return tokenizer.decode(out, skip_special_tokens=True)


def drawn(folder, prompt, tokens=30, **options):
    return "".join(tarnn.load(folder).generate(prompt, max_new_tokens=tokens, **options))


@pytest.mark.parametrize("kind", ["linear", "softmax", "hybrid", "learned"])
def test_text_is_that_of_load_from_the_same_seed(command, checkpoints, kind):
    options = ("--max-new-tokens", 30, "--seed", 7, "--temperature", 0.8, "--top-p", 0.9)
    code, out, err = command("generate", checkpoints[kind], "--prompt", "Call me", *options)
    assert code == 0
    assert out == drawn(checkpoints[kind], "Call me", temperature=0.8, top_p=0.9, seed=7)
    assert "temperature 0.8, top-k off, top-p 0.9, seed 7" in err
    assert "tokens/s" in err


def test_greedy_from_argument_file_and_stdin(command, checkpoints, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_bytes(b"Call me")
    expected = generated(checkpoints["linear"], b"Call me")
    greedy = ("generate", checkpoints["linear"], "--greedy", "--max-new-tokens", 30, "--quiet")
    assert command(*greedy, "--prompt", "Call me") == (0, expected, "")
    assert command(*greedy, "--prompt-file", tmp_path / "prompt.txt") == (0, expected, "")
    assert command(*greedy, "--temperature", 0, "--prompt", "Call me").out == expected
    monkeypatch.setattr(sys, "stdin", stdin_of(b"Call me"))
    assert command(*greedy, "--prompt-file", "-") == (0, expected, "")
    with (tmp_path / "prompt.txt").open() as file:  # a redirected stdin, without being asked for
        monkeypatch.setattr(sys, "stdin", file)
        assert command(*greedy) == (0, expected, "")


def test_an_empty_prompt_starts_a_document(command, checkpoints):
    expected = generated(checkpoints["linear"], b"")
    code, out, err = command("generate", checkpoints["linear"], "--prompt", "", "--greedy", "--max-new-tokens", 30)
    assert (code, out) == (0, expected)
    assert "prompt 1 tokens" in err


def test_a_byte_model_takes_any_bytes(command, checkpoints, monkeypatch):
    data = b"Caf\xc3 \xff\xfe\x00"
    monkeypatch.setattr(sys, "stdin", stdin_of(data))
    arguments = ("generate", checkpoints["linear"], "--prompt-file", "-", "--greedy", "--max-new-tokens", 5)
    code, out, err = command(*arguments)
    assert code == 0
    assert f"prompt {len(data)} tokens" in err
    assert out == generated(checkpoints["linear"], data, 5)


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_a_book_is_read_once_and_continued_many_times(command, checkpoints, tmp_path, kind):
    book, state = tmp_path / "book.txt", tmp_path / "book.state"
    book.write_text("It was the best of times, it was the worst of times. " * 40)
    line = ("generate", checkpoints[kind], "--greedy")
    read = command(*line, "--prompt-file", book, "--max-new-tokens", 0, "--state-out", state)
    assert (read.code, read.out) == (0, "")
    assert f"state after {book.stat().st_size:,} tokens in {state}" in read.err
    for more in ("", "Then ", "And yet"):
        whole = book.read_bytes() + more.encode()
        expected = generated(checkpoints[kind], whole, 20)
        options = ("--prompt", more) if more else ()
        outcome = command(*line, "--state-in", state, *options, "--max-new-tokens", 20, "--quiet")
        assert outcome == (0, expected, "")
    assert state.stat().st_size < 5000 or kind == "hybrid"


def test_two_runs_joined_by_a_state_are_one(command, checkpoints, tmp_path):
    line = ("generate", checkpoints["linear"], "--greedy", "--quiet", "--max-new-tokens")
    whole = command(*line, 24, "--prompt", "Call me").out
    parts = [command(*line, 1, "--prompt", "Call me", "--state-out", tmp_path / "s").out]
    for _ in range(22):
        parts.append(command(*line, 1, "--state-in", tmp_path / "s", "--state-out", tmp_path / "s").out)
    parts.append(command(*line, 1, "--state-in", tmp_path / "s").out)
    assert "".join(parts) == whole


def test_a_cache_in_bfloat16_goes_on_from_a_state_as_one(command, checkpoints, tmp_path):
    line = ("generate", checkpoints["hybrid"], "--greedy", "--quiet", "--max-new-tokens")
    begun = ("--prompt", "Call me", "--cache", "bfloat16")
    whole = command(*line, 12, *begun)
    first = command(*line, 5, *begun, "--state-out", tmp_path / "s")
    rest = command(*line, 7, "--state-in", tmp_path / "s")
    assert (whole.code, first.out + rest.out) == (0, whole.out)


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
@pytest.mark.parametrize("greedily", [True, False])
def test_min_p_and_repetition_penalty(command, checkpoints, kind, greedily):
    options = ("--greedy",) if greedily else ("--seed", 3, "--min-p", 0.05)
    options = ("--prompt", "Call me", "--repetition-penalty", 1.4, "--max-new-tokens", 40, *options)
    if greedily:
        expected = generated(checkpoints[kind], b"Call me", 40, repetition_penalty=1.4)
    else:
        expected = drawn(checkpoints[kind], "Call me", 40, repetition_penalty=1.4, min_p=0.05, seed=3)
    assert command("generate", checkpoints[kind], *options).out == expected


def test_a_prompt_that_is_a_folder_or_not_there(command, checkpoints, tmp_path, monkeypatch):
    line = ("generate", checkpoints["linear"], "--prompt-file")
    assert command(*line, tmp_path).is_refusal(tmp_path, "Is a directory")
    assert command(*line, tmp_path / "none").is_refusal(tmp_path / "none", "No such file")
    monkeypatch.setattr(sys, "stdin", None)
    assert command(*line, "-").is_refusal("stdin is closed")


def test_stop_strings_end_the_text_and_are_not_shown(command, checkpoints):
    line = ("generate", checkpoints["linear"], "--greedy", "--max-new-tokens", 30, "--prompt", "Call me")
    text = command(*line).out
    stop = text[10:12]
    outcome = command(*line, "--stop", "never to be seen", "--stop", stop)
    assert outcome.out == text[: text.index(stop)]
    assert "a stop string was met" in outcome.err


def test_several_samples_are_the_choices_of_one_seed(command, checkpoints):
    """The first is what the seed gives alone; no two are alike."""
    line = ("generate", checkpoints["hybrid"], "--prompt", "ab", "--seed", 1, "--max-new-tokens", 20, "--quiet")
    one, three = command(*line), command(*line, "--num-samples", 3)
    texts = re.split(r"--- sample \d ---\n", three.out)[1:]
    assert texts[0].removesuffix("\n") == one.out.removesuffix("\n")
    assert len(set(texts)) == 3


def test_the_step_says_which_it_is_and_why(command, checkpoints):
    short = ("--prompt", "x", "--max-new-tokens", 2)
    if library.available():
        assert "fused step (float32 weights)" in command("generate", checkpoints["hybrid"], *short).err
    with library.disabled():
        told = command("generate", checkpoints["linear"], *short).err
        assert "plain step; no fused step: the compiled kernels can't be used" in told


@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
def test_the_fused_step_is_taken_where_it_serves(command, checkpoints):
    """The same text from the same seed, with it and without; weights of fewer bits are asked for by name."""
    options = ("--prompt", "ab", "--max-new-tokens", 30, "--seed", 3)
    fused = command("generate", checkpoints["linear"], *options)
    assert "fused step (float32 weights)" in fused.err
    with library.disabled():
        assert command("generate", checkpoints["linear"], *options).out == fused.out
    assert "fused step (int8 weights)" in command("generate", checkpoints["linear"], *options, "--weights", "int8").err
    with library.disabled():
        assert command("generate", checkpoints["linear"], *options, "--weights", "int8").is_refusal(
            "compiled kernels can't be used", "Leave --weights out"
        )


BAD_OPTIONS = {
    "top-p of 0": (("--top-p", 0), ("top-p", "above 0")),
    "top-p above 1": (("--top-p", 1.5), ("top-p", "at most 1", "1.5")),
    "negative temperature": (("--temperature", -0.5), ("temperature", "-0.5")),
    "temperature that is no number": (("--temperature", "nan"), ("temperature", "nan")),
    "negative top-k": (("--top-k", -1), ("top-k", "-1")),
    "negative max-new-tokens": (("--max-new-tokens", -1), ("--max-new-tokens", "-1")),
    "no samples": (("--num-samples", 0), ("--num-samples", "got 0")),
    "negative seed": (("--seed", -3), ("--seed", "-3")),
    "a seed of 23 digits": (("--seed", 10**22), ("--seed", "2**63")),
    "min-p above 1": (("--min-p", 1.5), ("min-p", "1.5")),
    "repetition penalty of 0": (("--repetition-penalty", 0), ("repetition-penalty", "above 0")),
    "repetition penalty that is no number": (("--repetition-penalty", "nan"), ("repetition-penalty", "nan")),
    "a device without numbers": (("--device", "meta"), ("--device meta", "cpu")),
    "more samples than memory": (("--num-samples", 10**14), ("memory", "less at once")),
    "more samples than a size can be": (("--num-samples", 10**30), ("memory", "less at once")),
    "unknown option": (("--top-q", 1), ("--top-q", "--help")),
    "empty stop string": (("--stop", ""), ("stop string",)),
    "prompt twice": (("--prompt-file", "x"), ("--prompt", "--prompt-file", "one of them")),
    "unknown device": (("--device", "abacus"), ("--device abacus", "cpu")),
    "unknown dtype": (("--dtype", "float3"), ("--dtype", "float32")),
    "samples and greedy": (("--greedy", "--num-samples", 2), ("--num-samples 2", "--greedy")),
    "samples and a state": (("--num-samples", 2, "--state-out", "x"), ("--state-out",)),
    "state-out is a folder": (("--state-out", "/"), ("it is a folder",)),
    "state-out's folder is missing": (("--state-out", "/no/such/x.state"), ("/no/such", "Make it first")),
    "cache of a state": (("--state-in", "x", "--cache", "bfloat16"), ("--cache", "--state-in")),
    "cache of no softmax layers": (("--cache", "bfloat16"), ("softmax layers", "Leave it out")),
    "missing state": (("--state-in", "missing.state"), ("missing.state", "--state-out")),
}


@pytest.mark.parametrize("bad", list(BAD_OPTIONS))
def test_bad_options_are_refused_in_a_sentence(command, checkpoints, bad):
    options, words = BAD_OPTIONS[bad]
    outcome = command("generate", checkpoints["linear"], "--prompt", "x", "--max-new-tokens", 3, *options)
    assert outcome.is_refusal(*words)


def test_bad_checkpoints_are_refused_in_a_sentence(command, checkpoints, tmp_path):
    def refused(*words, folder=tmp_path / "copy"):
        return command("generate", folder, "--prompt", "x", "--max-new-tokens", 3).is_refusal(folder, *words)

    assert refused("does not exist", "tarnn train")
    shutil.copytree(checkpoints["linear"], tmp_path / "copy")
    weights, config = tmp_path / "copy" / "model.safetensors", tmp_path / "copy" / "config.json"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert refused("model.safetensors", "cut short", "intact copy")
    config.write_text(config.read_text().replace("norm_eps", "norm_epz"))
    assert refused("norm_epz", "norm_eps")
    config.write_text('{"model_type": "bert", "hidden_size": 768}')
    assert refused("'bert' are not handled", "llama")


def test_a_prompt_that_cannot_be_read_or_does_not_fit(command, checkpoints, tmp_path):
    outcome = command("generate", checkpoints["linear"], "--prompt-file", tmp_path / "missing.txt")
    assert outcome.is_refusal(tmp_path / "missing.txt", "No such file", "--prompt")
    outcome = command("generate", checkpoints["learned"], "--prompt", "x" * 40, "--max-new-tokens", 9)
    assert outcome.is_refusal("48 positions", "40 of the prompt", "9 new ones", "--max-new-tokens")
    options = ("--max-new-tokens", 0, "--state-out", tmp_path / "s", "--quiet")
    assert command("generate", checkpoints["learned"], "--prompt", "x" * 48, *options).code == 0
    outcome = command("generate", checkpoints["learned"], "--state-in", tmp_path / "s", "--max-new-tokens", 1)
    assert outcome.is_refusal("48 positions", "48 tokens of the state")


def test_a_bpe_model_takes_no_broken_utf8(command, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["linear"], tmp_path / "bpe")
    train_bpe([b"aaab aaab aaab"], 258).save_pretrained(folder)
    (tmp_path / "bad.txt").write_bytes(b"fine so far \xff\xfe")
    outcome = command("generate", folder, "--prompt-file", tmp_path / "bad.txt", "--max-new-tokens", 3)
    assert outcome.is_refusal("UTF-8", "12")
    (tmp_path / "good.txt").write_bytes(b"<|endoftext|>" * 9 + b"aa")
    outcome = command("generate", folder, "--prompt-file", tmp_path / "good.txt", "--max-new-tokens", 3)
    assert outcome.code == 0


def test_a_tokenizer_that_is_too_large_for_the_model(command, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints["linear"], tmp_path / "bpe")
    train_bpe([b"aaab aaab aaab aaac aaac"], 262).save_pretrained(folder)
    outcome = command("generate", folder, "--prompt", "", "--max-new-tokens", 3)
    assert outcome.is_refusal("the model knows 257", "tokenizer")


def test_states_that_are_not_this_models_are_refused(command, checkpoints, tmp_path):
    state = tmp_path / "a.state"

    def refused(*words, folder=checkpoints["linear"]):
        return command("generate", folder, "--state-in", state, "--max-new-tokens", 3).is_refusal(state, *words)

    command("generate", checkpoints["hybrid"], "--prompt", "x", "--max-new-tokens", 0, "--state-out", state)
    assert refused("another model")
    state.write_bytes(state.read_bytes()[:300])
    assert refused("cut short", "--state-out")
    state.write_text("The Republic, by Plato")
    assert refused("no state file")


def test_a_full_disk_leaves_the_old_state_alone(command, checkpoints, tmp_path):
    state = tmp_path / "a.state"
    line = ("generate", checkpoints["linear"], "--prompt", "x", "--max-new-tokens", 0, "--quiet", "--state-out")
    assert command(*line, "/dev/full").is_refusal("/dev/full", "No space left", "Make room")
    assert command(*line, state).code == 0
    before = state.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        outcome = command(*line, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.is_refusal(state, "File too large", "as it was")
    assert state.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.state"]


@pytest.fixture
def executable(checkpoints, tmp_path):
    """The real command, with more to say than anyone will read: no token ends its text."""
    endless = shutil.copytree(checkpoints["linear"], tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((endless / name).read_text())
        (endless / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    running = []

    def start(stdout, *options):
        line = [TARNN, "generate", endless, "--prompt", "x", *options]
        line += ["--max-new-tokens", "1000000", "--temperature", "2"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # what this process ignores a child ignores: a suite in the background would see no Ctrl-C
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        running.append(subprocess.Popen([str(a) for a in line], stdout=stdout, stderr=subprocess.PIPE, env=environment))
        signal.signal(signal.SIGINT, before)
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_reader_that_leaves_ends_it_quietly(executable, tmp_path):
    process = executable(subprocess.PIPE, "--state-out", tmp_path / "s")
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.wait() == 0
    err = process.stderr.read().decode()
    assert "nobody reads on" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert (tmp_path / "s").is_file()


def test_ctrl_c_ends_it_quietly(executable):
    process = executable(subprocess.PIPE)
    assert process.stdout.read(20)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate()
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "tarnn: interrupted"
    assert b"Traceback" not in err + rest


def test_a_full_stdout_is_an_error_in_a_sentence(executable):
    with open("/dev/full", "wb") as full:
        process = executable(full)
        assert process.wait() == 2
    err = process.stderr.read().decode()
    assert err.splitlines()[-1].startswith("tarnn: error: ")
    assert "No space left" in err
    assert "Traceback" not in err
    assert "Exception ignored" not in err
