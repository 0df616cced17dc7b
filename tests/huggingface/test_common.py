"""What transformers' own tests of all its models ask for, where no other file here does: four models, both classes."""

import pytest
import torch
from safetensors.torch import save_file

from tarnn.models import TarnnForCausalLM, TarnnModel

KINDS = ("default", "paper", "hybrid", "random features")
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=[TarnnForCausalLM, TarnnModel])
def make(request, kind, make_model):
    """make(**overrides): the model, or its body."""
    whole = request.param is TarnnForCausalLM
    return lambda **overrides: make_model(kind, **overrides) if whole else make_model(kind, **overrides).model


def test_all_tensors_are_parameters_or_buffers(make, ids):
    """Nothing is left behind on the CPU when a model moves: on the meta device all of it runs."""
    model = make().to("meta")
    assert model(ids(2, 6).to("meta"), use_cache=False)[0].device.type == "meta"
    with torch.device("meta"):
        built = type(model)(model.config)
    assert {x.device.type for x in (*built.parameters(), *built.buffers())} == {"meta"}


def test_all_missing_weights_are_started(make, tmp_path):
    """From an empty checkpoint comes a new model: the same numbers as from the config alone, none left as allocated."""
    model = make().float()
    model.save_pretrained(tmp_path)
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    fresh = type(model)(model.config)
    for (name, a), (_, b) in zip(loaded.named_parameters(), fresh.named_parameters(), strict=True):
        assert a.isfinite().all(), name
        assert a.std(correction=0).item() == pytest.approx(b.std(correction=0).item(), rel=0.3, abs=1e-6), name
    for (name, a), (_, b) in zip(loaded.named_buffers(), fresh.named_buffers(), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@torch.no_grad()
def test_a_body_gets_a_head(kind, make_model, ids, tmp_path):
    """Each class loads what the other has saved; a head that was not saved starts anew, or is the tied embedding."""
    model, x = make_model(kind), ids(2, 6)
    model.model.save_pretrained(tmp_path)
    loaded = TarnnForCausalLM.from_pretrained(tmp_path)
    hidden = model.model(x).last_hidden_state
    torch.testing.assert_close(loaded.model(x).last_hidden_state, hidden, **CLOSE)
    if model.config.tie_word_embeddings:
        torch.testing.assert_close(loaded(x).logits, model(x).logits, **CLOSE)
    assert loaded.lm_head.weight.std() > 0


def test_shapes_that_do_not_fit(make, tmp_path):
    """Refused, or left out where one says so: the rest is loaded."""
    model = make()
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path, vocab_size=41)
    loaded = type(model).from_pretrained(tmp_path, vocab_size=41, ignore_mismatched_sizes=True)
    assert loaded.get_input_embeddings().weight.shape[0] == 41
    a, b = (m.base_model.layers[0].mlp.up_proj.weight for m in (model, loaded))
    assert torch.equal(a, b)


@torch.no_grad()
def test_outputs_by_argument_by_config_and_as_a_tuple(make, ids):
    model, x = make(), ids(2, 6)
    asked = {"output_hidden_states": True} | ({"output_attentions": True} if has_softmax(model) else {})
    by_argument = model(x, use_cache=False, **asked)
    model.config._attn_implementation = "eager"  # transformers' condition for attentions in a config
    for name, value in asked.items():
        setattr(model.config, name, value)
    by_config = model(x, use_cache=False)
    as_tuple = model(x, use_cache=False, return_dict=False)
    assert list(by_argument) == list(by_config)
    assert len(by_argument.hidden_states) == model.config.num_hidden_layers + 1
    for a, b, c in zip(by_argument.to_tuple(), by_config.to_tuple(), as_tuple, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        torch.testing.assert_close(a, c, rtol=0, atol=0)


def test_gradients_reach_what_is_handed_out(make, ids):
    model, x = make(), ids(2, 6)
    out = model(x, output_hidden_states=True, **({"output_attentions": True} if has_softmax(model) else {}))
    watched = [*out.hidden_states, *(out.attentions or ())]
    for tensor in watched:
        tensor.retain_grad()
    out[0].sum().backward()
    assert all(tensor.grad is not None for tensor in watched)


def test_inputs_can_be_made_to_require_gradients(make, ids):
    """What fine-tuning with frozen embeddings and gradient checkpointing needs."""
    model = make().train()
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": True})
    assert model(ids(2, 6))[0].requires_grad


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_ways_to_compute_attention(make, ids, tmp_path, implementation):
    """The same function in each; another can't be had."""
    model, x = make(), ids(2, 6)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation=implementation)
    torch.testing.assert_close(loaded(x)[0], model(x)[0], **CLOSE)
    with pytest.raises((ValueError, ImportError)):
        type(model).from_pretrained(tmp_path, attn_implementation="flash_attention_2")


def has_softmax(model) -> bool:
    return "tarnn_softmax" in model.config.layer_types
