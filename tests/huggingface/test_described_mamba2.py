"""transformers' Mamba-2, patched: `generate` by the fused step writes what `forward` writes."""

import copy

import pytest
import torch
from support.fused_texts import LONG, WAYS, generated
from support.linear_families import TOKENS, linear_model
from transformers import DynamicCache

import tarnn
from tarnn.huggingface.fused_forward import fused_forward
from tarnn.huggingface.versions import as_called, cache_of
from tarnn.kernels.cpu import library

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def model():
    model = linear_model("Mamba-2")
    with tarnn.patch_transformers():
        yield model


@pytest.mark.parametrize("way", WAYS)
def test_the_same_text(model, tokens, way):
    expected = generated(model, TOKENS[:, :12], None, **WAYS[way])
    assert not tokens
    assert torch.equal(generated(model, TOKENS[:, :12], "float32", **WAYS[way]), expected)
    assert tokens == [12, *[1] * 19]


def test_padding_before_a_text(model, tokens):
    x, mask = TOKENS[:, :12], torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    found = generated(model, x, "float32", attention_mask=mask)
    assert tokens == [12, *[1] * 19]
    assert torch.equal(found, generated(model, x, None, attention_mask=mask))
    assert torch.equal(found[1:, 5:], generated(model, x[1:, 5:], "float32"))


@torch.no_grad()
def test_logits_and_caches_are_those_of_forward(model, tokens):
    """Pieces by the fused step and by forward in turns on one cache; by forward alone on another."""
    one, other = (DynamicCache(config=model.config) for _ in range(2))
    mask, at, pieces = torch.ones_like(TOKENS), 0, [6, 1, 1, 1, 9, 1, 1, 7, 1, 1, 1, 1, 2, 1]
    mask[0, :4] = 0
    for i, n in enumerate(pieces):
        piece, real = TOKENS[:, at : at + n], mask[:, at : at + n].bool()
        at += n
        options = {"attention_mask": mask[:, :at], "use_cache": True}
        with fused_forward(model, None if i in (2, 5, 6, 9) else "float32"):
            found = model(piece, **as_called(model.forward, one), **options)
        expected = model(piece, **as_called(model.forward, other), **options)
        torch.testing.assert_close(found.logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
        assert type(found) is type(expected)
        assert cache_of(found) is one
    assert tokens == [n for i, n in enumerate(pieces) if i not in (2, 5, 6, 9)]
    for x, y in zip(one.layers, other.layers, strict=True):
        torch.testing.assert_close(x.recurrent_states[0], y.recurrent_states[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(x.conv_states[0], y.conv_states[0], rtol=1e-4, atol=1e-4)


def test_a_cache_goes_on_and_a_copy_of_it_by_itself(model, tokens):
    first = generated(model, TOKENS[:, :12], "float32", return_dict_in_generate=True)
    cache, fork = cache_of(first), copy.deepcopy(cache_of(first))
    more = TOKENS[:, 30:35]
    read = torch.cat([first.sequences, more], 1)
    expected = generated(model, read, None)
    del tokens[:]
    for held in (cache, fork):
        with fused_forward(model, "float32"), torch.no_grad():
            last = torch.cat([first.sequences[:, -1:], more], 1)  # a text's last token was not read yet
            token = model(last, **as_called(model.forward, held), use_cache=True).logits[:, -1].argmax(-1)
            text = [token]
            for _ in range(19):
                token = model(token[:, None], **as_called(model.forward, held), use_cache=True).logits[:, -1].argmax(-1)
                text.append(token)
        assert torch.equal(torch.stack(text, 1), expected[:, read.shape[1] :])
    assert tokens == [6, *[1] * 19] * 2


def test_it_is_taken_by_default_and_for_one_model_alone(tokens):
    model = linear_model("Mamba-2")
    expected = model.generate(TOKENS[:, :12], **LONG)
    with tarnn.patch_transformers(model):
        assert torch.equal(model.generate(TOKENS[:, :12], **LONG), expected)
    assert tokens == [1] * 11
    assert torch.equal(generated(model, TOKENS[:, :12], "float32"), expected)
    assert len(tokens) == 11


def test_padding_among_tokens_that_go_on_is_left_out_as_without_it(model):
    mask, outputs = torch.ones(2, 10, dtype=torch.int64), []
    mask[0, 7] = 0
    for weights in ("float32", None):
        cache = DynamicCache(config=model.config)
        with fused_forward(model, weights), torch.no_grad():
            model(TOKENS[:, :6], **as_called(model.forward, cache), use_cache=True)
            out = model(TOKENS[:, 6:10], **as_called(model.forward, cache), use_cache=True, attention_mask=mask)
            outputs.append(out.logits[mask[:, 6:].bool()])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
