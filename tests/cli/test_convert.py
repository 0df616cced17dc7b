"""`tarnn convert`: a checkpoint in, a calibrated one out; what can't be converted is one sentence, exit code 2."""

import errno
import json
import shlex
import warnings

import pytest
import torch
import transformers as hf
from support.linear_families import FAMILIES, linear_model

from tarnn.conversion import constant_cache
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding.lm import load
from tarnn.huggingface.versions import CACHE
from tarnn.kernels.cpu import library

compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
SMALL = ["--window", "16", "--sinks", "2", "--features", "16", "--num-texts", "3", "--length", "64"]


def test_converts_and_says_what_it_cost(tarnn, llama, text, tmp_path):
    out = tmp_path / "out"
    code, shown, err = tarnn("convert", llama, out, "--texts", text, *SMALL, "--exact-layers", 1)
    assert code == 0, err
    assert shown.startswith("   checkpoint  ")  # resolved options first
    assert "nats per token" in shown
    assert "output errors of each head" in err
    loaded = hf.AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config._attn_implementation == "tarnn_hybrid"
    assert {x.name for x in out.iterdir()} >= {"conversion.json", "conversion.md", "model.safetensors"}
    code, _, err = tarnn("convert", llama, out, "--texts", text, *SMALL)
    assert code == 2
    assert "exists already" in err
    code, _, err = tarnn("convert", out, tmp_path / "again", "--texts", text, *SMALL)
    assert code == 2
    assert "has been converted" in err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: hf.BloomConfig(vocab_size=256, hidden_size=32, n_layer=1, n_head=4), "no attention interface"),
        (
            lambda: hf.T5Config(vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
            "position_bias|no attention interface|decoder",
        ),
    ],
)
def test_models_that_cannot_be_converted(tarnn, text, tmp_path, config, words):
    config = config()
    kind = hf.BloomForCausalLM if config.model_type == "bloom" else hf.T5EncoderModel
    kind(config).save_pretrained(tmp_path / "model")
    code, _, err = tarnn("convert", tmp_path / "model", tmp_path / "out", "--texts", text, *SMALL)
    assert code == 2
    assert any(word in err for word in words.split("|"))
    assert err.strip().splitlines()[-1].startswith("tarnn: error: ")
    assert not (tmp_path / "out").exists()


def test_refusals(tarnn, llama, text, tmp_path):
    def refused(*argv):
        code, _, err = tarnn("convert", *argv)
        assert code == 2
        return err

    out = tmp_path / "out"
    assert "longer than window + sinks = 202" in refused(llama, out, "--texts", text, *SMALL, "--window", 200)
    assert "no config.json" in refused(tmp_path / "nothing", out, "--texts", text)
    assert "no such file" in refused(llama, out, *SMALL, "--texts", tmp_path / "nothing")
    assert "feature_map must be one of" in refused(llama, out, "--texts", text, *SMALL, "--feature-map", "x")
    assert "too small" in refused(llama, out, "--texts", text, *SMALL, "--budget", 10)
    assert "128 tokens at most" in refused(llama, out, "--texts", text, *SMALL, "--length", 4096)
    assert "--device meta can't be used" in refused(llama, out, "--texts", text, *SMALL, "--device", "meta")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "nosuch"}')
    assert "can't be read as a checkpoint" in refused(tmp_path / "other", out, "--texts", text)
    assert not out.exists()


AGAINST = ("finetune", "--against-softmax")
NUMBERS = {
    "convert": ["window -1", "window 0", "sinks -1", "slots -1", "features 0", "exact-layers -1", "budget 0", "num-texts 0",
                "length 1", "window 2.5"],
    "finetune": ["steps 0", "steps -3", "batch-size 0", "num-texts -1", "length 1", "learning-rate nan", "learning-rate -1",
                 "learning-rate inf", "learning-rate 0"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "option"), [(x, y) for x, of in NUMBERS.items() for y in of])
def test_numbers_are_checked_before_any_work(command, tmp_path, name, option):
    """No folder is looked at: this one has nothing in it."""
    option, value = option.split()
    folder, out, none = (tmp_path / x for x in ("in", "out", "none"))
    given = {"convert": [folder, out, "--texts", none], "finetune": ["--against-softmax", folder, none, "--out", out]}
    outcome = command(name, *given[name], f"--{option}", value)
    assert outcome.is_refusal(option.replace("learning-rate", "learning"))
    assert "none" not in outcome.err
    assert not (tmp_path / "out").exists()


def test_lengths_are_checked_before_the_texts_are_read(command, llama, tmp_path):
    converted, options = tmp_path / "converted", ["--window", "16", "--sinks", "2", "--length", "18"]
    outcome = command("convert", llama, tmp_path / "out", "--texts", tmp_path / "none", *options)
    assert outcome.code == 2
    assert "longer than window + sinks = 18 tokens" in outcome.err
    (tmp_path / "text").write_text("the cat sat on the mat, " * 50)
    command("convert", llama, converted, "--texts", tmp_path / "text", *SMALL)
    outcome = command(*AGAINST, converted, "--out", tmp_path / "out", tmp_path / "none", "--length", "18")
    assert outcome.code == 2
    assert "longer than window + sinks = 18 tokens" in outcome.err
    assert not (tmp_path / "out").exists()


def test_window_and_sinks_alone(tarnn, command, llama, text, tmp_path):
    out = tmp_path / "out"
    code, shown, err = tarnn("convert", llama, out, "--texts", text, *SMALL[:4], "--feature-map", "none", *SMALL[6:])
    assert code == 0, err
    assert "features  none" in shown
    assert shown.splitlines()[-1].split(maxsplit=1) == ["next", f'tarnn generate {out} --prompt "Once upon a time"']
    loaded = hf.AutoModelForCausalLM.from_pretrained(out)
    assert not any("centres" in x for x, _ in loaded.named_parameters())
    both = command("convert", llama, tmp_path / "other", "--texts", text, "--feature-map", "none", "--features", "8")
    assert both.is_refusal("--feature-map none has no features")


def test_finetune_goes_on_from_what_convert_wrote(tarnn, llama, text, tmp_path):
    converted, out = tmp_path / "converted", tmp_path / "out"
    tarnn("convert", llama, converted, "--texts", text, *SMALL, "--feature-map", "hedgehog")
    options = [text, "--num-texts", "4", "--length", "64", "--steps", "3", "--batch-size", "1"]
    code, shown, err = tarnn(*AGAINST, converted, "--out", out, *options)
    assert code == 0, err
    assert "before: " in err
    assert "nats per token" in shown
    hf.AutoModelForCausalLM.from_pretrained(out)
    assert tarnn(*AGAINST, converted, "--out", out, *options, "--resume")[0] == 0  # nothing left to do, and no error
    code, _, err = tarnn(*AGAINST, llama, "--out", tmp_path / "other", *options)
    assert code == 2
    assert "not been converted" in err
    code, _, err = tarnn(*AGAINST, converted, "--out", tmp_path / "other", *options, "--device", "meta")
    assert code == 2
    assert "--device meta can't be used" in err


def die(*_, **__):
    raise KeyboardInterrupt  # as a kill would, but that this process goes on


def no_room(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("end", [die, no_room])
def test_a_conversion_that_ends_early_leaves_nothing(tarnn, llama, text, tmp_path, end, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("tarnn.conversion.report.Report.save", end)
        code, _, err = tarnn("convert", llama, out, "--texts", text, *SMALL)
    assert code == (130 if end is die else 2)
    assert end is die or "the disk is full" in err.splitlines()[-1]
    assert sorted(x.name for x in tmp_path.iterdir()) == ["llama", "text.txt"]
    (tmp_path / ".out.partial").mkdir()  # of one that was killed
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    assert tarnn("convert", llama, out, "--texts", text, *SMALL)[0] == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["llama", "out", "text.txt"]


@pytest.mark.parametrize("end", [die, no_room])
def test_a_training_that_ends_early_blocks_nothing(tarnn, llama, text, tmp_path, end, monkeypatch):
    converted, out = tmp_path / "converted", tmp_path / "out"
    tarnn("convert", llama, converted, "--texts", text, *SMALL, "--feature-map", "hedgehog")
    options = [text, "--num-texts", "4", "--length", "64", "--steps", "2", "--batch-size", "1"]
    with monkeypatch.context() as patch:  # before its first checkpoint: the corrected command just runs
        patch.setattr("tarnn.conversion.distil_trainer.run", end)
        assert tarnn(*AGAINST, converted, "--out", out, *options)[0] == (130 if end is die else 2)
    assert [x.name for x in out.iterdir()] == ["run.lock"]
    for name in ("run.lock", "log.jsonl"):  # of one that was killed
        (out / name).touch()
    with monkeypatch.context() as patch:  # after it: nothing half-written, and --resume
        patch.setattr("tarnn.conversion.report.Report.save", end)
        code, _, err = tarnn(*AGAINST, converted, "--out", out, *options)
        assert code == (130 if end is die else 2)
    assert sorted(x.name for x in out.iterdir()) == ["checkpoints", "log.jsonl", "run.lock"]
    code, _, err = tarnn(*AGAINST, converted, "--out", out, *options)
    assert (code, "go on in it with --resume" in err) == (2, True)
    assert tarnn(*AGAINST, converted, "--out", out, *options, "--resume")[0] == 0
    hf.AutoModelForCausalLM.from_pretrained(out)


def test_where_nothing_can_be_written(tarnn, text, tmp_path):
    (tmp_path / "file").touch()
    for command in (["convert", "--texts", text], [*AGAINST, "--out"]):
        files = [tmp_path / "file" / "out", tmp_path / "file"]
        given = [[tmp_path / "nothing", x] if "convert" in command else [x, tmp_path / "nothing", text] for x in files]
        code, _, err = tarnn(*command, *given[0])
        assert (code, "no folder that can be written" in err) == (2, True)
        code, _, err = tarnn(*command, *given[1])
        assert (code, "name a new folder" in err) == (2, True)


@pytest.fixture
def converted(tarnn, llama, text, tmp_path):
    code, _, err = tarnn("convert", llama, tmp_path / "converted", "--texts", text, *SMALL, "--mode", "features")
    assert code == 0, err
    return tmp_path / "converted"


@compiled
def test_generate_writes_what_transformers_would(command, converted):
    """In constant memory, beyond the length of the calibration too; 128 tokens are the model's context."""
    model = hf.AutoModelForCausalLM.from_pretrained(converted)
    prompt = "the cat sat on the mat, " * 3
    ids = torch.tensor([list(prompt.encode())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = model.generate(ids, do_sample=False, max_new_tokens=40, **{CACHE: constant_cache(model)})
    outcome = command("generate", converted, "--prompt", prompt, "--greedy", "--max-new-tokens", 40)
    assert outcome.code == 0, outcome.err
    assert outcome.out == bytes(expected[0, ids.shape[1] :].tolist()).decode("utf-8", "replace")
    assert "features calibrated on 64 tokens, window and sinks alone beyond" in outcome.err
    assert "Warning" not in outcome.err
    assert "tarnn: fused step (float32 weights)" in outcome.err
    fewer = command("generate", converted, "--prompt", prompt, "--greedy", "--max-new-tokens", 4, "--weights", "int8")
    assert "tarnn: fused step (int8 weights)" in fewer.err
    several = command("generate", converted, "--prompt", prompt, "--num-samples", 2, "--max-new-tokens", 5, "--seed", 1)
    assert several.out.count("--- sample") == 2


def test_generate_refuses_what_does_not_fit_a_converted_model(command, converted, llama, tmp_path):
    assert command("generate", converted, "--prompt", "a", "--cache", "bfloat16").is_refusal("--cache", "has none")
    assert command("generate", converted, "--prompt", "a", "--max-new-tokens", 400).is_refusal("128 positions")
    assert command("generate", converted, "--prompt", "").is_refusal("the prompt is empty")
    assert command("generate", llama, "--prompt", "a", "--max-new-tokens", 3).code == 0  # as any Llama
    assert command("predict", converted, "a").is_refusal("tarnn generate")


@compiled
def test_a_state_of_a_converted_model_is_continued(command, converted, tmp_path):
    line = ("generate", converted, "--greedy", "--quiet", "--max-new-tokens")
    whole = command(*line, 40, "--prompt", "the cat sat")
    first = command(*line, 25, "--prompt", "the cat sat", "--state-out", tmp_path / "s")
    rest = command(*line, 15, "--state-in", tmp_path / "s")
    assert (whole.code, first.out + rest.out) == (0, whole.out)


@compiled
def test_without_a_fused_step_transformers_computes(command, tarnn, llama, text, tmp_path):
    """It says why."""
    out = tmp_path / "slots"
    assert tarnn("convert", llama, out, "--texts", text, *SMALL, "--slots", 3)[0] == 0
    reason = "the config of this LlamaForCausalLM, tarnn_attention: slots must be 0 here; got 3"
    outcome = command("generate", out, "--prompt", "the cat", "--max-new-tokens", 3)
    assert (outcome.code, f"on a cache of constant size; no fused step: {reason}" in outcome.err) == (0, True)
    lm = load(out)
    state, written = (
        lm.read("the "),
        command("generate", out, "--prompt", "the cat", "--greedy", "-q", "--max-new-tokens", 9),
    )
    for _ in range(2):  # a state is a value
        assert "".join(lm.generate("cat", state=state, temperature=0, max_new_tokens=9)) == written.out
    assert command("generate", out, "--prompt", "a", "--state-out", tmp_path / "s").is_refusal(
        "--state-out takes a fused"
    )
    assert command("generate", out, "--prompt", "a", "--weights", "int8").is_refusal(
        f"--weights is not possible here: {reason}"
    )
    assert f"not fused: {reason}" in " ".join(command("info", out).out.split())


def test_info_of_a_converted_model(command, converted, llama):
    outcome = command("info", converted, "--lengths", "100,1000")
    assert outcome.code == 0, outcome.err
    assert "LlamaForCausalLM" in outcome.out
    assert "window 16, 2 sinks" in outcome.out
    assert "calibrated on 64 tokens" in outcome.out
    facts = json.loads(command("info", converted, "--lengths", "100,1000", "--json").out)
    assert [x["length"] for x in facts["memory"]] == [100, 1000]
    # two layers, two heads, keys and values of width 8 in float32: 18 exact tokens, 16 clusters of 9 sums
    exact, sums = 2 * 2 * 18 * 16 * 4, 2 * 2 * 16 * 9 * 4
    assert {x["state_bytes"] for x in facts["memory"]} == {exact + sums}
    assert [x["softmax_state_bytes"] for x in facts["memory"]] == [2 * 2 * x * 16 * 4 for x in (100, 1000)]
    assert "LlamaForCausalLM" in command("info", llama).out


@pytest.fixture
def classifier(tarnn, tmp_path, text):
    """A converted classifier of bytes: `predict` and `show` read it."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        id2label={0: "bad", 1: "good"},
    )
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    byte_tokenizer().save_pretrained(tmp_path / "bert")
    code, shown, err = tarnn("convert", tmp_path / "bert", tmp_path / "out", "--texts", text, *SMALL)
    assert code == 0, err
    assert shown.splitlines()[-1].split(maxsplit=1) == ["next", f'tarnn predict {tmp_path / "out"} "a text"']
    return tmp_path / "out"


def test_predict_and_show_read_converted_encoders(command, classifier, tmp_path):
    outcome = command("predict", classifier, "the cat sat", "a hat", "--json")
    assert outcome.code == 0, outcome.err
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert [row["input"] for row in rows] == ["the cat sat", "a hat"]
    model = hf.AutoModelForSequenceClassification.from_pretrained(classifier)
    for row in rows:
        ids = torch.tensor([list(row["input"].encode())])
        with torch.no_grad():
            shares = model(input_ids=ids).logits[0].softmax(-1).tolist()
        assert row["probabilities"] == pytest.approx(dict(zip(("bad", "good"), shares)), abs=1e-5)
        assert row["output"] == max(row["probabilities"], key=row["probabilities"].get)
    shown = command("show", classifier, "--input", "the cat sat on the mat, on the hat", "--out", tmp_path / "page")
    assert shown.code == 0, shown.err
    assert (tmp_path / "page" / "attention.html").is_file()
    assert command("generate", classifier, "--prompt", "a").is_refusal("tarnn predict")


def saved(folder, model):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def of_bytes(name):
    config = FAMILIES[name]()
    config.vocab_size = 257
    return linear_model(name, config)


def as_typed(shown):
    """The command of the last line."""
    name, program, *argv = shlex.split(shown.splitlines()[-1])
    assert (name, program) == ("next", "tarnn")
    return argv


@pytest.mark.parametrize("name", ["Qwen3.5", "Granite 4"])
def test_what_comes_next_works_for_linear_families(command, text, tmp_path, name):
    folder, out = saved(tmp_path / "model", of_bytes(name)), tmp_path / "out"
    shown = command("convert", folder, out, "--texts", text, *SMALL)
    assert shown.code == 0, shown.err
    outcome = command(*as_typed(shown.out), "--max-new-tokens", 5, "--num-samples", 2)
    assert outcome.code == 0, outcome.err
    assert "--- sample 2" in outcome.out
    shown = command("eval", out, text, "--context", 64)
    assert shown.code == 0, shown.err
    assert as_typed(shown.out) == ["generate", str(out)]


@pytest.mark.parametrize(("name", "why"), [("MiniMax", "a cache of its own"), ("Falcon-H1", "layer 0 of")])
def test_what_would_gain_nothing_is_refused(command, text, tmp_path, name, why):
    folder = saved(tmp_path / "model", of_bytes(name))
    assert command("convert", folder, tmp_path / "out", "--texts", text, *SMALL).is_refusal(why, "cache constant")


@pytest.mark.parametrize("masked", [True, False])
def test_masked_text_needs_a_mask(command, text, tmp_path, masked):
    """Where the tokenizer has none, no command is proposed that would need one."""
    folder, out = tmp_path / "bert", tmp_path / "out"
    config = hf.BertConfig(
        vocab_size=258, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    saved(folder, hf.BertForMaskedLM(config))
    if masked:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        tokenizer.save_pretrained(folder)
    shown = command("convert", folder, out, "--texts", text, *SMALL)
    assert shown.code == 0, shown.err
    next_command = as_typed(shown.out)
    assert next_command[0] == ("predict" if masked else "show")
    assert command(*next_command).code == 0
    if not masked:
        assert command("predict", out, "a text").is_refusal("has no mask token")


def test_predict_reads_a_converted_model_of_bytes_without_a_tokenizer(command, text, tmp_path):
    config = hf.BertConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128,
    )  # fmt: skip
    hf.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    assert command("convert", tmp_path / "bert", tmp_path / "out", "--texts", text, *SMALL).code == 0
    assert command("predict", tmp_path / "out", "a text").code == 0
