"""LFM2, LFM3 and RWKV-7 through `tarnn.load`: what it writes, reads, keeps and tells, and their packed files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.open_folders import CONFIGS_OF_5_24, make_folder
from support.rwkv_models import fla_weights, rwkv_model, save_rwkv
from transformers import AutoModelForCausalLM

import tarnn
from tarnn.decoding.pack import pack_folder
from tarnn.errors import UserError
from tarnn.program.plain import PlainRuntime

needs_5_24 = pytest.mark.skipif(not CONFIGS_OF_5_24, reason="transformers has no LFM3 before 5.24")
KINDS = ["LFM2", pytest.param("LFM3", marks=needs_5_24), "rwkv.cpp", "fla"]
PROMPT = "Call me Ishmael, é"


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    place, kind = tmp_path_factory.mktemp("folders") / "tiny", request.param
    return make_folder(place, kind) if kind.startswith("LFM") else save_rwkv(place, kind)


@pytest.fixture
def lm(folder):
    return tarnn.load(folder)


def oracle(folder, ids):
    """Logits of the model's modules: of transformers, or of `RwkvModel` in float64."""
    config, model = json.loads((folder / "config.json").read_text()), rwkv_model(264)
    if "norm_eps" in config:
        fla_weights(model)  # sets its eps
    with torch.no_grad():
        if config["model_type"] != "rwkv7":
            return AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        return model(ids).float()


def test_logits(folder, lm):
    ids = lm.ids(PROMPT)[None]
    torch.testing.assert_close(lm.logits(ids), oracle(folder, ids), atol=2e-4, rtol=1e-4)


def test_a_text_is_what_its_logits_say(lm):
    """Greedily: each token is the likeliest after all before it, read as a whole."""
    writing = lm.generate(PROMPT, max_new_tokens=12, temperature=0)
    text = "".join(writing)
    ids = lm.ids(PROMPT).tolist()
    for token in writing.ids:
        assert int(lm.logits(torch.tensor([ids]))[0, -1].argmax()) == token
        ids.append(token)
    assert text == lm.tokenizer.decode(writing.ids, skip_special_tokens=True)
    assert lm.tokenizer.decode(lm.ids(PROMPT)) == PROMPT


def test_pieces_and_steps_are_the_whole(lm, tmp_path):
    """A state is a value: two texts go on from it, also from a file."""
    state = lm.read("Call me ")
    whole, step = lm.read("Call me Ishmael"), state
    for token in lm.ids("Ishmael"):
        logits, step = lm.step(token[None], step)
    lm.save(state, tmp_path / "s")
    for x in (logits, lm.read("Ishmael", state).logits, lm.read("Ishmael", lm.open_state(tmp_path / "s")).logits):
        if isinstance(lm.opened.step, PlainRuntime):
            torch.testing.assert_close(x, whole.logits, atol=1e-4, rtol=1e-4)
        else:
            assert torch.equal(x, whole.logits)
    assert lm.state().position.tolist() == [0]
    assert whole.position.tolist() == [len("Call me Ishmael")]


def test_facts_are_those_of_the_weights_and_states(folder, lm):
    weights, facts = load_file(folder / "model.safetensors"), lm.info([7])
    is_lfm = facts["architecture"].startswith("Lfm")
    assert facts["parameters"] == sum(x.numel() for x in weights.values())
    assert facts["end_ids"] == ([257, 259] if is_lfm else [257])
    assert facts["memory"][0]["state_bytes"] == lm.opened.new_state(1, 7).nbytes
    assert (facts["state_bytes_per_token"] > 0) == facts["architecture"].startswith("Lfm2")  # a window grows no more


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_packed_file_writes_what_the_folder_writes(folder, lm, tmp_path, weights):
    if isinstance(lm.opened.step, PlainRuntime):
        with pytest.raises(UserError, match="can't be packed: "):
            pack_folder(folder, tmp_path / "x.tarnn", weights)
        return
    pack_folder(folder, tmp_path / "x.tarnn", weights)
    texts = [
        "".join(tarnn.load(*source).generate(PROMPT, max_new_tokens=20, seed=3, temperature=0.9))
        for source in ((folder, weights), (tmp_path / "x.tarnn",))
    ]
    assert texts[0] == texts[1] != ""


def test_a_trained_model_opens_as_a_folder(data, tmp_path):
    """Its logits are those that were saved beside its weights."""
    weights = load_file(data("tiny_rwkv") / "rwkv7.safetensors")
    expected = weights.pop("expected_logits")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "rwkv7"}')
    lm = tarnn.load(tmp_path)
    assert (lm.read('"in').logits[0] - expected).abs().max() < 2e-5
    assert "".join(lm.generate('"in', max_new_tokens=9, temperature=0)).isprintable()
