"""The laws that every kind of attention keeps, whatever it computes."""

from itertools import pairwise

import pytest
import torch
from support.attention_definition import define

from tarnn.attention import LinearAttention, NoAttention, SoftmaxAttention
from tarnn.ops import KVCache

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def positions(start, stop):
    return torch.arange(start, stop)[None]


def same(state, other):
    """Whether two states hold the same numbers under the same names."""
    mine, theirs = state.tensors(), other.tensors()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())


def test_it_is_its_definition(layer, rand):
    x = rand(2, 9, 14)
    torch.testing.assert_close(layer(x), define(layer, x), **CLOSE)


@pytest.mark.parametrize("first", [1, 4])
def test_prefill_and_steps_are_the_whole(causal, rand, first):
    """forward(x) = forward(x[:first]) ++ forward(x[first:6], state) ++ steps."""
    x = rand(2, 9, 14)
    state = causal.new_state(2, capacity=9)
    y1, state = causal(x[:, :first], positions=positions(0, first), state=state, return_state=True)
    y2, state = causal(x[:, first:6], positions=positions(first, 6), state=state, return_state=True)
    outputs = [y1, y2]
    for i in range(6, 9):
        y, state = causal.step(x[:, i : i + 1], state, positions=positions(i, i + 1))
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), causal(x), **CLOSE)


def test_the_first_state_may_come_from_nothing(causal, rand):
    x = rand(2, 5, 14)
    y1, state = causal(x[:, :4], return_state=True)
    if isinstance(state, KVCache):  # just large enough for what it holds: no room for a fifth token
        with pytest.raises(ValueError, match="full"):
            causal.step(x[:, 4:], state, positions=positions(4, 5))
        return
    y2, _ = causal.step(x[:, 4:], state, positions=positions(4, 5))
    torch.testing.assert_close(torch.cat([y1, y2], dim=1), causal(x), **CLOSE)


@torch.no_grad()
def test_step_in_place_writes_and_step_without_does_not(causal, rand):
    x, state = rand(2, 4, 14), causal.new_state(2, capacity=8)
    _, state = causal(x[:, :3], positions=positions(0, 3), state=state, return_state=True)
    before = state.clone()
    y, new = causal.step(x[:, 3:], state, positions=positions(3, 4))
    assert same(state, before)
    addresses = [x.data_ptr() for x in state.tensors().values()]
    y2, after = causal.step(x[:, 3:], state, positions=positions(3, 4), inplace=True)
    assert [x.data_ptr() for x in after.tensors().values()] == addresses
    assert torch.equal(y, y2)
    assert same(after, new)
    for name, x in after.tensors().items():  # M, a maximum, may stay, as what does not fade
        assert name in ("M", "fade") or not x.numel() or not torch.equal(x, before.tensors()[name])


def test_padding_is_cutting(layer, rand):
    """On the left, on the right, on both sides; and one row that is whole."""
    x, mask = rand(4, 7, 14), torch.ones(4, 7, dtype=torch.bool)
    mask[0, :3] = mask[1, 4:] = mask[2, 0] = mask[2, 5:] = False
    y = layer(x, key_mask=mask)
    for row in range(4):
        torch.testing.assert_close(y[row, mask[row]], layer(x[row : row + 1, mask[row]])[0], **CLOSE)


def test_padding_left_out_of_the_state(causal, rand):
    """A padded prompt and the prompt alone leave the same behind for the next token."""
    x, mask = rand(1, 6, 14), torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    new = rand(1, 1, 14)
    states = [causal.new_state(1, capacity=9) for _ in range(2)]
    place = (positions(0, 6) - 2).clamp(min=0)
    _, padded = causal(x, key_mask=mask, positions=place, state=states[0], return_state=True)
    _, alone = causal(x[:, 2:], positions=positions(0, 4), state=states[1], return_state=True)
    y, _ = causal.step(new, padded, positions=positions(4, 5))
    y2, _ = causal.step(new, alone, positions=positions(4, 5))
    torch.testing.assert_close(y, y2, **CLOSE)


def test_packed_is_a_loop(causal, rand):
    cuts = [0, 3, 3, 4, 9]
    x = rand(1, 9, 14)
    y = causal(x, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for a, b in pairwise(cuts):
        if b > a:
            torch.testing.assert_close(y[:, a:b], causal(x[:, a:b]), **CLOSE)


def test_the_future_does_not_reach_the_past(causal, rand):
    """Causality to the bit."""
    x, other = rand(2, 9, 14), rand(2, 9, 14) * 100
    for t in (1, 5, 8):
        changed = torch.cat([x[:, :t], other[:, t:]], dim=1)
        assert torch.equal(causal(x)[:, :t], causal(changed)[:, :t])
        assert not torch.equal(causal(x)[:, t:], causal(changed)[:, t:])


def test_a_query_that_sees_no_key_yields_zeros(causal, rand):
    x = rand(2, 4, 14).requires_grad_()
    y = causal(x, key_mask=torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]]).bool())
    nothing = causal.o_proj(y.new_zeros(causal.o_proj.in_features))  # the bias, if any
    torch.testing.assert_close(y[0, :2], nothing.expand(2, -1), rtol=0, atol=0)
    torch.testing.assert_close(y[1], nothing.expand(4, -1), rtol=0, atol=0)
    y.square().sum().backward()
    assert x.grad.isfinite().all()


def test_every_parameter_learns(causal, rand):
    y = causal(rand(2, 6, 14))
    (y * torch.linspace(-1, 1, 14, dtype=y.dtype)).sum().backward()
    for name, p in causal.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0 or name == "k_proj.bias", name  # softmax does not see a bias of its keys


def test_gradients_are_right(causal, rand):
    x = rand(1, 4, 14).requires_grad_()
    mask = torch.tensor([[0, 1, 1, 1]]).bool()
    assert torch.autograd.gradcheck(lambda x: causal(x, key_mask=mask), x, fast_mode=True)


def test_low_precision_is_as_good_as_the_definition_in_it(causal, rand):
    """bf16: the error is at most twice that of the definition computed in bf16."""
    x = rand(2, 33, 14)
    with torch.no_grad():
        exact = define(causal, x)
        causal.bfloat16()
        x = x.bfloat16()
        y, plain = causal(x), define(causal, x)
    assert y.dtype == torch.bfloat16
    error, allowed = ((z.double() - exact).norm() for z in (y, plain))
    assert error <= 2 * allowed


@torch.no_grad()
def test_autocast(causal, rand):
    """As low precision, with the weights in float32; prefill and step too."""
    x = rand(2, 9, 14)
    exact = define(causal, x)
    causal.float()
    x = x.float()
    with torch.autocast("cpu", torch.bfloat16):
        y, plain = causal(x), define(causal, x)
        state = causal.new_state(2, capacity=9)
        y1, state = causal(x[:, :8], state=state, positions=positions(0, 8), return_state=True)
        y2, state = causal.step(x[:, 8:], state, positions=positions(8, 9))
    assert y.dtype == torch.bfloat16
    allowed = 2 * (plain - exact).norm()
    assert (y - exact).norm() <= allowed
    assert (torch.cat([y1, y2], dim=1) - exact).norm() <= allowed


def test_state_keeps_its_size(causal, rand):
    if isinstance(causal, SoftmaxAttention):
        pytest.skip("a key/value cache is what this is compared with")
    sizes = []
    for t in (1, 50):
        _, state = causal(rand(2, t, 14), return_state=True)
        sizes.append(state.nbytes)
    assert sizes[0] == sizes[1] == causal.new_state(2).nbytes


def test_cross_is_its_definition(cross, rand):
    x, context = rand(2, 5, 14), rand(2, 8, 10)
    torch.testing.assert_close(cross(x, context), define(cross, x, context), **CLOSE)


def test_cross_masks_the_context(cross, rand):
    x, context, mask = rand(2, 5, 14), rand(2, 8, 10), torch.ones(2, 8, dtype=torch.bool)
    mask[0, 3:] = False
    y = cross(x, context, key_mask=mask)
    torch.testing.assert_close(y[:1], cross(x[:1], context[:1, :3]), **CLOSE)
    torch.testing.assert_close(y[1:], cross(x[1:], context[1:]), **CLOSE)


def test_cross_reads_a_context_once(cross, rand):
    """What forward leaves behind is the context: later queries need no more, and leave it as it is."""
    x, context = rand(2, 5, 14), rand(2, 8, 10)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    _, state = cross(x[:, :1], context, key_mask=mask, return_state=True)
    before = state.clone()
    whole = cross(x, context, key_mask=mask)
    torch.testing.assert_close(cross(x, state=state), whole, **CLOSE)
    y, state = cross.step(x[:, 2:3], state)
    torch.testing.assert_close(y, whole[:, 2:3], **CLOSE)
    assert same(state, before)


KINDS = (LinearAttention, SoftmaxAttention, NoAttention)


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_kind_takes(kind, rand):
    x, context = rand(2, 3, 14).float(), rand(2, 3, 10).float()
    causal, both_sides = (kind(14, 2, causal=causal) for causal in (True, False))
    cross = kind(14, 2, causal=False, context_size=10)
    with pytest.raises(ValueError, match=r"one token.*got \(2, 3, 14\)"):
        causal.step(x, causal.new_state(2, capacity=4))
    with pytest.raises(ValueError, match="both sides has no step"):
        both_sides.step(x[:, :1], both_sides.new_state(2, capacity=4))
    with pytest.raises(ValueError, match=r"takes no context.*context_size="):
        causal(x, context)
    with pytest.raises(ValueError, match="needs a context"):
        cross(x)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 14, "num_heads": 4}, "hidden_size must be a multiple of num_heads.*14 and num_heads = 4"),
        ({"hidden_size": 12, "num_heads": 6, "num_kv_heads": 4}, "multiple of num_kv_heads; got 6 and 4"),
        ({"hidden_size": 12, "num_heads": 6, "context_size": 5}, "no order of keys to be causal in"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxAttention(causal=True, **sizes)


def test_mixing_is_linear_in_the_values(layer, rand):
    """`mix` with one-hot values gives the matrix of weights, as wide as there are keys, and A v = o."""
    x, mask = rand(2, 7, 14), torch.tensor([[1] * 7, [1] * 5 + [0] * 2]).bool()
    how = {
        "key_mask": mask,
        "cu_seqlens": None,
        "positions": None,
        "rotation": None,
        "state": None,
        "return_state": False,
        "inplace": False,
    }
    q, k, v = layer.project(x, x)
    one_hot = torch.eye(7, dtype=x.dtype).expand(2, v.shape[1], 7, 7)
    weights, o = layer.mix(x, q, k, one_hot, **how)[0], layer.mix(x, q, k, v, **how)[0]
    values = v.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    torch.testing.assert_close(weights @ values, o, **CLOSE)
    assert weights.shape == (2, 6, 7, 7)
    assert not weights[1, :, :, 5:].any()
    assert not layer.causal or not weights.triu(1).any()
