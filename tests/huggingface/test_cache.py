"""Our layers in a transformers cache: size, beams, resets, static caches, and what they refuse."""

import pytest
import torch
from support.model_kinds import KINDS, UNFUSED, build
from support.models import fixtures_of
from transformers import StaticCache

from tarnn.ops import State

kind, model, make_model = fixtures_of(KINDS | UNFUSED, build)


def filled(model, x, mask=None):
    return model(x, attention_mask=mask, use_cache=True).cache


@torch.no_grad()
def logits_after(model, cache, token):
    return model(token, cache=cache).logits[:, -1]


@torch.no_grad()
def test_growth_of_a_softmax_layer(make_model, ids):
    """Doubled when full, so that few copies are made; nothing is lost in them."""
    model, x = make_model("softmax"), ids(1, 200)
    cache = filled(model, x[:, :10])
    capacities = []
    for i in range(10, 200):
        last = logits_after(model, cache, x[:, i : i + 1])
        capacities.append(cache.layers[0].state.capacity)
    assert sorted(set(capacities)) == [64, 128, 256]
    torch.testing.assert_close(last, model(x).logits[:, -1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_growth_keeps_the_padding(make_model, ids):
    model, x = make_model("softmax"), ids(1, 70)
    mask = (torch.arange(70) >= 3).long()[None]
    cache = filled(model, x[:, :64], mask[:, :64])
    out = model(x[:, 64:], cache=cache, attention_mask=mask)
    torch.testing.assert_close(out.logits[:, -1], model(x[:, 3:]).logits[:, -1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_rows_can_be_reordered_repeated_and_picked(model, ids):
    x = ids(3, 5)
    token = ids(1, 1)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    one_more = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], dim=1)
    plain = model(token.expand(3, 1), cache=filled(model, x, mask), attention_mask=one_more).logits
    operations = {
        "reorder": (lambda c, i: c.reorder_cache(i), torch.tensor([2, 2, 0])),
        "pick": (lambda c, i: c.batch_select_indices(i), torch.tensor([1, 0])),
        "pick by mask": (lambda c, i: c.batch_select_indices(torch.tensor([True, False, True])), torch.tensor([0, 2])),
        "repeat": (lambda c, i: c.batch_repeat_interleave(2), torch.tensor([0, 0, 1, 1, 2, 2])),
    }
    for name, (operation, index) in operations.items():
        cache = filled(model, x, mask)
        operation(cache, index)
        n = len(index)
        logits = model(token.expand(n, 1), cache=cache, attention_mask=one_more[index]).logits
        torch.testing.assert_close(logits, plain[index], rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@torch.no_grad()
def test_reset(model, ids):
    x = ids(2, 5)
    cache = filled(model, x)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(x, cache=cache).logits, model(x).logits, rtol=0, atol=0)


@torch.no_grad()
def test_static_cache(model, ids):
    x = ids(2, 8)
    cache = StaticCache(config=model.config, max_cache_len=8)
    model(x[:, :7], cache=cache)
    torch.testing.assert_close(logits_after(model, cache, x[:, 7:]), model(x).logits[:, -1], rtol=1e-9, atol=1e-9)
    if "tarnn_softmax" in model.config.layer_types:
        with pytest.raises(ValueError, match="the key/value cache is full: it holds 8 positions"):
            logits_after(model, cache, x[:, :1])


def test_what_was_not_recorded_cannot_be_cropped(make_model, ids):
    cache = filled(make_model(), ids(1, 4))
    cache.crop(0)
    with pytest.raises(ValueError, match="can't forget its last tokens"):
        cache.crop(-1)
    assert not cache.is_croppable
    softmax = filled(make_model("softmax"), ids(1, 4))
    assert softmax.is_croppable
    with pytest.raises(ValueError, match=r"cropped to 0 … 4; got -1"):
        softmax.crop(-5)


@torch.no_grad()
@pytest.mark.parametrize("parts", [[4, 1, 1, 1], [4, 3]])
@pytest.mark.parametrize("removed", [0, 1, 3, 4, 6, 7])
def test_cropping_is_never_having_read(model, ids, removed, parts):
    """As many of the last seven tokens, read in these parts, go as the caller says."""
    x, last = ids(1, 12), ids(1, 1)
    cache = filled(model, x[:, :5])
    cache.activate_past_recording()
    for part in x[:, 5:].split(parts, dim=1):
        model(part, cache=cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == 12 - removed
    expected = model(torch.cat([x[:, : 12 - removed], last], dim=1)).logits[:, -1]
    torch.testing.assert_close(logits_after(model, cache, last), expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_crop_that_one_layer_refuses_leaves_all_as_they_were(make_model, ids):
    model, x = make_model("all three"), ids(1, 12)
    cache = filled(model, x[:, :5])
    cache.activate_past_recording()
    model(x[:, 5:11], cache=cache)
    with pytest.raises(ValueError, match=r"takes n up to 6 here; got crop\(-7\)"):
        cache.crop(-7)
    torch.testing.assert_close(logits_after(model, cache, x[:, 11:]), model(x).logits[:, -1], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_only_the_last_tokens_of_a_long_text_are_remembered(make_model, ids):
    """One state in 16 tokens, and none from more than 80 tokens ago."""
    model, x = make_model("linear", num_hidden_layers=1), ids(1, 200)
    cache = filled(model, x[:, :5])
    cache.activate_past_recording()
    for i in range(5, 200):
        model(x[:, i : i + 1], cache=cache)
    stretches = cache.layers[0]._past._stretches
    assert 64 <= len(stretches) < 80
    assert sum(isinstance(x.state, State) for x in stretches) <= 5
    cache.crop(-60)
    expected = model(x[:, :141]).logits[:, -1]
    torch.testing.assert_close(logits_after(model, cache, x[:, 140:141]), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.compile
@torch.no_grad()
@pytest.mark.parametrize("kind", ["linear", "softmax", "hybrid"])
def test_export_with_a_cache_and_any_length(make_model, ids, kind):
    """Without a mask, batch and length left open: softmax layers know neither when they are exported."""

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model(kind)

        def forward(self, x):
            return self.model(x, use_cache=True).logits

    model, dim = Logits(), torch.export.Dim
    shapes = {0: dim("b", max=64), 1: dim("t", min=2, max=1000)}
    exported = torch.export.export(model, (ids(2, 12),), dynamic_shapes=(shapes,), strict=False).module()
    for x in (ids(3, 17), ids(1, 100)):
        torch.testing.assert_close(exported(x), model(x))


def test_transformers_exporter_may_set_what_it_finds(make_model, ids):
    """It gives every tensor in an object's attributes another, in place; tuples it rebuilds from a generator."""
    from transformers.exporters.utils import duplicate_leaf_tensors, get_leaf_tensors

    for kind in ("all three", "hybrid"):
        cache = filled(make_model(kind), ids(2, 4))
        before = [layer.state.tensors() for layer in cache.layers]
        found = get_leaf_tensors(duplicate_leaf_tensors(cache))
        assert len(found) >= sum(map(len, before))
        for layer, tensors in zip(cache.layers, before, strict=True):
            assert all(torch.equal(x, tensors[name]) for name, x in layer.state.tensors().items())


@torch.no_grad()
def test_a_softmax_cache_has_the_keys_dtype_not_the_weights(make_model, ids):
    """Quantised weights are integers; keys are what the layer computes from them."""

    class Quantised(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.scale = linear.weight.abs().amax() / 127
            self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)

    model, x = make_model("hybrid"), ids(2, 6)
    for block in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(block.attention, name, Quantised(getattr(block.attention, name)))
    expected = model(x, use_cache=False).logits[:, -1]
    torch.testing.assert_close(logits_after(model, filled(model, x[:, :5]), x[:, 5:]), expected)
    _, state = model.prefill(x[:, :5], model.new_state(2, capacity=6))
    torch.testing.assert_close(model.step(x[:, 5], state)[0], expected.float())
    assert state.layers[1].k.dtype == torch.float64
