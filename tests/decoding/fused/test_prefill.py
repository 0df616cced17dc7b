"""Many tokens at once by the fused step: to the last bit what one after the other gives."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, example, given, settings, strategies as some
from support.step_models import MAPS, SERVED, SERVED_IMAGES, image_model, text_model

from scripts.common.clock import with_threads
from tarnn.decoding.fused import FusedStep
from tarnn.families.own import text
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.ops import KVCache
from tarnn.program import runtime

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")

OF_MAPS = {
    name: {
        "feature_map": name,
        "feature_map_options": {name: options},
        "num_hidden_layers": 2,
        "normalize": name not in ("identity", "gaussian", "trigonometric"),
        "max_position_embeddings": 64,
        "num_key_value_heads": 2,
        "decay": "head",
    }
    for name, options in MAPS.items()
}
KINDS = SERVED | {f"map {name}": choices for name, choices in OF_MAPS.items()}
PADDINGS = ("none", "left", "right", "holes")


@cache
def step_of(kind, weights):
    return FusedStep(text_model(**KINDS[kind]), weights)


def one_by_one(step, ids, state):
    """Parameters after each token of one row, and the state behind them."""
    outs = []
    for token in ids:
        out, state = step(token[None], state)
        outs.append(out[0])
    return torch.stack(outs), state


def assert_row(state, row, expected):
    """A row of a state is another of one row, to the last bit; caches where they are not masked."""
    assert state.position[row] == expected.position[0]
    for layer, alone in zip(state.layers, expected.layers, strict=True):
        if not isinstance(layer, KVCache):
            assert all(torch.equal(x[row], alone.tensors()[name][0]) for name, x in layer.tensors().items())
            continue
        k, v, mask = layer.used()
        kept = slice(None) if mask is None else mask[row]
        assert torch.equal(k[row][:, kept], alone.used()[0][0])
        assert torch.equal(v[row][:, kept], alone.used()[1][0])


def padded(lengths, padding, generator):
    """A mask (b, t) of rows with that many tokens, or None."""
    if padding == "none":
        return None
    t = max(lengths) + 3
    places = torch.arange(t)
    orders = {"left": places.flip(0), "right": places}
    rows = [orders.get(padding, torch.randperm(t, generator=generator)) < n for n in lengths]
    return torch.stack(rows)


@given(
    some.sampled_from(sorted(KINDS)),
    some.sampled_from(FORMATS),
    some.lists(some.integers(1, 60), min_size=1, max_size=4),
    some.sampled_from(PADDINGS),
    some.lists(some.integers(1, 60), max_size=2),
    some.sampled_from([1, 3]),
    some.sampled_from([5, 64, runtime.ROWS]),
)
@example("softmax", "float32", [6, 17, 13, 47], "right", [], 1, 5)  # pieces in which some rows have no token
@settings(max_examples=60, deadline=None)
def test_it_is_to_the_last_bit_what_steps_give(kind, weights, lengths, padding, cuts, threads, rows):
    """In pieces cut anywhere, alone or beside others, with padding or without, with any number of threads.

    Padding before a key moves it to another lane of softmax's sums, in a step, too: there another test allows for rounding.
    """
    assume(padding in ("none", "right") or "softmax" not in KINDS[kind].get("attention", ""))
    step, generator = step_of(kind, weights), torch.Generator().manual_seed(len(lengths) + lengths[0])
    mask = padded(lengths, padding, generator)
    t = max(lengths) if mask is None else mask.shape[1]
    ids = torch.randint(0, 97, (len(lengths), t), generator=generator)
    pieces = list(pairwise([0, *sorted({x for x in cuts if x < t}), t]))
    assume(mask is None or all(mask[:, slice(*piece)].any(-1).all() for piece in pieces))
    state, outs = step.model.new_state(len(lengths), capacity=t), []
    with with_threads(threads), pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "ROWS", rows)
        for piece in (slice(*piece) for piece in pieces):
            part = None if mask is None else mask[:, piece]
            outs.append(step.prefill(ids[:, piece], state, part, every=True)[0])
            last, state = step.prefill(ids[:, piece], state, part)
    for row in range(len(lengths)):
        real = slice(None) if mask is None else mask[row]
        expected, alone = one_by_one(step, ids[row][real], step.model.new_state(1, capacity=t))
        assert torch.equal(torch.cat(outs, 1)[row][real], expected)
        assert torch.equal(last[row], expected[-1])
        assert_row(state, row, alone)


@pytest.mark.parametrize("padding", ["left", "holes"])
@pytest.mark.parametrize("kind", ["softmax", "hybrid"])
def test_padding_between_keys_changes_no_more_than_rounding(kind, padding, monkeypatch):
    """Against the model, in pieces; then a step goes on."""
    monkeypatch.setattr(runtime, "ROWS", 20)
    step, mask = step_of(kind, "float32"), padded([3, 30, 17], padding, torch.Generator().manual_seed(0))
    model, ids = step.model, torch.randint(0, 97, mask.shape)
    logits, state = step.prefill(ids, model.new_state(3, capacity=40), mask)
    expected, read = model.prefill(ids, model.new_state(3, capacity=40), mask)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step(ids[:, 0], state)[0], model.step(ids[:, 0], read)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(SERVED_IMAGES))
def test_images_too(kind):
    model = image_model(**SERVED_IMAGES[kind])
    labels = {"class_labels": torch.tensor([0, 1])} if model.config.num_classes else {}
    step, values = FusedStep(model), torch.randint(0, 256, (2, model.config.sequence_length))
    outs, state = step.prefill(values, model.new_state(2, **labels), every=True)
    after = model.new_state(2, **labels)
    for i, token in enumerate(values.T):
        out, after = step(token, after)
        assert torch.equal(outs[:, i], out)
    assert_same(state, after)


def test_positions_beyond_a_table_are_computed(monkeypatch):
    """Those that a formula gives are not kept for long models; each piece has its own."""
    model = text_model(position="sinusoidal", max_position_embeddings=64)
    short = FusedStep(model)
    monkeypatch.setattr(text, "MOST_PLACES", 8)
    long = FusedStep(model)
    assert [len(step.runtime.packed.tables) for step in (short, long)] == [2, 1]
    monkeypatch.setattr(runtime, "ROWS", 7)
    ids, mask = torch.randint(0, 97, (2, 20)), torch.ones(2, 20)
    mask[1, 2:9] = 0
    for step in (short, long):
        assert step.prefill(ids, model.new_state(2), mask)[0].allclose(
            model.prefill(ids, model.new_state(2), mask)[0], atol=1e-4
        )


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_long_cache(weights, dtype):
    """Of several blocks, the last of them begun by a piece in its middle."""
    model = text_model(attention=["softmax", "linear"], num_key_value_heads=2, num_hidden_layers=2)
    step, ids = FusedStep(model, weights), torch.randint(0, 97, (1, 1100))
    _, state = step.prefill(ids[:, :1000], model.new_state(1, 1100, dtype))
    outs, after = step.prefill(ids[:, 1000:], state, every=True)
    expected, alone = one_by_one(step, ids[0, 1000:], state)
    assert torch.equal(outs[0], expected)
    assert_row(after, 0, alone)


@pytest.mark.parametrize("width", [64, 128])
def test_scores_of_wide_heads(width):
    """Which of many tokens take from registers: the first 40, and 40 behind more keys than a block has."""
    model = text_model(attention="softmax", head_dim=width, num_attention_heads=2, num_hidden_layers=1)
    step, ids = FusedStep(model), torch.randint(0, 97, (1, 600))
    for start, end in ((0, 40), (560, 600)):
        _, state = step.prefill(ids[:, :start], model.new_state(1, 600)) if start else (None, model.new_state(1, 600))
        outs, _ = step.prefill(ids[:, start:end], state, every=True)
        assert torch.equal(outs[0], one_by_one(step, ids[0, start:end], state)[0])


def test_the_given_state_stays_unless_it_may_be_written():
    model = text_model(attention=["linear", "softmax"], num_hidden_layers=2)
    step, ids = FusedStep(model), torch.randint(0, 97, (2, 9))
    state = model.new_state(2, capacity=9)
    before, _ = state.clone(), step.prefill(ids, state)
    assert_same(state, before)
    assert state.layers[1].length == 0
    _, after = step.prefill(ids, state, inplace=True)
    assert after.layers[0].S.data_ptr() == state.layers[0].S.data_ptr()
    assert after.position.tolist() == state.position.tolist() == [9, 9]


@pytest.mark.parametrize(
    ("ids", "mask", "why"),
    [
        (torch.zeros(2, 3), None, "whole numbers; got .2, 3. of torch.float32"),
        (torch.zeros(2, dtype=torch.long), None, "token ids .b, t."),
        (torch.zeros(2, 0, dtype=torch.long), None, "at least one token"),
        (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 4), "attention_mask must be .b, t. = .2, 3."),
        (torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [0, 0, 0]]), "at least one token"),
        (torch.tensor([[0, 1], [2, 97]]), None, "from 0 to 96; got 97"),
        (torch.tensor([[0, 1], [2, -1]]), None, "from 0 to 96; got -1"),
        (torch.zeros(2, 60, dtype=torch.long), None, "up to 55 tokens"),
        (torch.zeros(2, 64, dtype=torch.long), None, "holds 60 positions, 0 are taken and 64 more"),
        (torch.zeros(3, 2, dtype=torch.long), None, "new_state.3."),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(ids, mask, why):
    model = text_model(
        attention=["linear", "softmax"], num_hidden_layers=2, position="learned", max_position_embeddings=55
    )
    state = model.new_state(2, capacity=60)
    before = state.clone()
    with pytest.raises(ValueError, match=why):
        FusedStep(model).prefill(ids, state, mask, inplace=True)
    assert all(torch.equal(x, y) for x, y in zip(whole(state), whole(before), strict=True))


def test_padding_holds_anything():
    """Tokens that are none, and NaN in the cache where no key is written."""
    model = text_model(attention=["softmax", "linear"], num_hidden_layers=2)
    step, ids = FusedStep(model), torch.tensor([[5, 6, 7], [-100, 10**6, 8]])
    mask = torch.tensor([[1, 1, 1], [0, 0, 1]])
    state = model.new_state(2, capacity=9)
    for x in (state.layers[0].k, state.layers[0].v):
        x.fill_(torch.nan)
    out, state = step.prefill(ids, state, mask)
    expected, alone = one_by_one(step, torch.tensor([8]), model.new_state(1, capacity=9))
    assert torch.equal(out[1], expected[0])
    more, _ = step(torch.tensor([1, 2]), state)
    assert torch.equal(more[1], step(torch.tensor([2]), alone)[0][0])


def assert_same(state, other):
    assert all(torch.equal(x, other.tensors()[name]) for name, x in state.tensors().items())


def whole(state):
    return [x for layer in (*state.layers, state) for x in vars(layer).values() if isinstance(x, torch.Tensor)]
