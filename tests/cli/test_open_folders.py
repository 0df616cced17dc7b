"""The commands on folders of transformers' language models."""

import json
import math

import pytest
import torch
from support.open_folders import make_folder
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import tarnn


@pytest.fixture(scope="module", params=["Qwen3.5", "Llama"])
def folder(request, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny", request.param)


def test_generate_writes_what_load_writes(command, folder):
    line = ("generate", folder, "--prompt", "Call me", "--max-new-tokens", 30, "--seed", 7)
    outcome = command(*line)
    assert outcome.out == "".join(tarnn.load(folder).generate("Call me", max_new_tokens=30, seed=7))
    assert "temperature 1, top-k off, top-p 1, seed 7" in outcome.err
    assert "fused step (float32 weights)" in outcome.err
    assert "fused step (int8 weights)" in command(*line, "--weights", "int8").err


def test_a_book_is_read_once(command, folder, tmp_path):
    """A state is saved and continued, to the bit; another model's is refused."""
    line = ("generate", folder, "--greedy", "--quiet", "--max-new-tokens")
    whole = command(*line, 12, "--prompt", "Call me")
    first = command(*line, 5, "--prompt", "Call me", "--state-out", tmp_path / "s")
    rest = command(*line, 7, "--state-in", tmp_path / "s")
    assert (whole.code, first.out + rest.out) == (0, whole.out)
    other = make_folder(tmp_path / "other", "Qwen3")
    assert command("generate", other, "--state-in", tmp_path / "s").is_refusal("was saved by another model")


def test_info_counts_what_there_is(command, folder):
    model, lm = AutoModelForCausalLM.from_pretrained(folder), tarnn.load(folder)
    outcome = command("info", folder, "--lengths", "7,40", "--json")
    facts = json.loads(outcome.out)
    assert facts["architecture"] == type(model).__name__
    assert facts["parameters"] == model.num_parameters()
    assert facts["weight_bytes"] == 4 * model.num_parameters()
    assert facts["weights"] == "float32"
    assert facts["state_bytes"] + 40 * facts["state_bytes_per_token"] == lm.opened.new_state(1, 40).nbytes
    softmax = [x for x in facts["layers"] if x["attention"] == "softmax"]
    assert [x["state_bytes_per_token"] for x in softmax] == [2 * 2 * 8 * 4] * (
        1 if "Qwen" in facts["architecture"] else 2
    )
    assert facts["memory"][1]["state_bytes"] == lm.opened.new_state(1, 40).nbytes
    page = command("info", folder, "--weights", "int8").out
    assert f"{facts['architecture']}" in page
    assert "CPU step    fused step (int8 weights)" in page
    assert f"{facts['state_bytes_per_token']} bytes per token" in page


def test_eval_measures_the_step(command, folder, tmp_path):
    """Bits per byte are those of transformers, and with int8 a little else."""
    text = tmp_path / "a.txt"
    text.write_text("Wunderland ist ueberall. " * 8)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text.read_text())["input_ids"])[None]
    with torch.no_grad():
        nats = cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:]).item()
    outcomes = [command("eval", folder, text, "--json", *x) for x in ((), ("--weights", "int8"))]
    plain, bytewise = (json.loads(x.out)["bits_per_byte"] for x in outcomes)
    assert plain == pytest.approx(nats / math.log(2), rel=1e-5)
    assert 1e-6 < abs(bytewise / plain - 1) < 0.1
    assert "fused step (float32 weights)" in outcomes[0].err
    assert "fused step (int8 weights)" in outcomes[1].err


def test_eval_of_what_has_no_step(command, tmp_path):
    """Transformers computes it, and a line says why; with --weights it is refused."""
    made = make_folder(tmp_path / "window", "Mistral", sliding_window=8)
    (tmp_path / "a.txt").write_text("Wunderland ist ueberall.")
    outcome = command("eval", made, tmp_path / "a.txt")
    assert (outcome.code, "computed by transformers: this MistralForCausalLM" in outcome.err) == (0, True)
    assert command("eval", made, tmp_path / "a.txt", "--weights", "int8").is_refusal("sliding_window")


def test_it_samples_as_the_folder_says(command, tmp_path):
    made = make_folder(tmp_path / "tiny", "Qwen3")
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [257, 259]}
    (made / "generation_config.json").write_text(json.dumps(settings))
    line = ("generate", made, "--prompt", "x", "--max-new-tokens", 3, "--seed", 1)
    assert "temperature 0.6, top-k 20, top-p 0.95, seed 1" in command(*line).err
    assert "temperature 2, top-k 20, top-p 0.95, seed 1" in command(*line, "--temperature", 2).err
    assert "; greedy" in command(*line, "--greedy").err


def test_what_cannot_run_is_refused_in_a_sentence(command, tmp_path):
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for line in (["generate"], ["info"], ["serve", "--port", 0]):
        assert command(line[0], tmp_path, *line[1:]).is_refusal("'gpt_neox' are not handled", "llama, mamba, mamba2, ")
    window = make_folder(tmp_path / "window", "Mistral", sliding_window=16)
    for line in (["generate", "--prompt", "a"], ["info"], ["serve", "--port", 0]):
        assert command(line[0], window, *line[1:]).is_refusal("sliding_window must be null", "got 16")
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    long = make_folder(tmp_path / "long", "Llama", torch.bfloat16, rope_parameters=scaled)
    assert command("generate", long, "--prompt", "a").is_refusal("rope_parameters", "yarn")
    assert command("generate", window, "--prompt", "a", "--class-label", 1).is_refusal("model of text")
