"""The compiled kernels against the definition: every mode, size, layout and dtype.

`fuzz.judge` holds a call's output, states and gradients against the definition in float64: in narrower dtypes to twice the
error of the definition computed in that dtype, and in float64, with the library that `tests/float64.sh` builds, to 1e-11. It
also tries another number of threads.
"""

from itertools import product

import pytest
import torch
from fuzz import errors, set_up
from support.fuzz_calls import WIDEST, Call
from support.kernel_calls import DTYPES, MODES, drawn, holds, same_bits

from tarnn import Elu, LinearAttention
from tarnn.kernels.cpu import linear as cpu
from tarnn.kernels.linear import BackwardInputs
from tarnn.ops import LinearState, linear_attention
from tarnn.ops.linear.arguments import make_call

pytestmark = pytest.mark.usefixtures("compiled")

SIZES = [1, 3, 15, 16, 17, 31, 33, 64, 65, 130]


# --- values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_low_precision_costs_at_most_twice_the_definitions_error(mode, dtype):
    holds(mode, dtype=dtype, d=16, options_narrow=True)


@pytest.mark.parametrize(("e", "d"), list(zip([16, 65, 31, 1, 130, 17, 64, 3, 15, 33], SIZES)))
@pytest.mark.parametrize("mode", MODES)
def test_every_width(mode, d, e):
    holds(mode, d=d, e=e, b=1, t=33)
    sizes = {"d": d, "e": e, "b": 1, "t": 33, "seed": 2}  # with seed 0 an argument of relu is 3e-7, so its sign is luck
    narrow, wide = (Call(drawn(mode, **sizes, dtype=x)) for x in ("float32", "float64"))
    wide.inputs, wide.grads = [x.double() for x in narrow.inputs], [x.double() for x in narrow.grads]
    # a wrong lane is wrong by all of its size
    found = errors(narrow.ours(), [x.detach().double() for x in wide.ours()])
    assert max(found.values()) < 1e-4


@pytest.mark.parametrize("t", [0, 1, 15, 16, 31, 32, 63, 65, 97])
@pytest.mark.parametrize("mode", MODES)
def test_every_length(mode, t):
    holds(mode, b=1, g=1, t=t, s=97 - t, d=5, e=3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [{"b": 0}, {"d": 0, "dtype": "float32"}, {"e": 0}])
def test_tensors_without_numbers(mode, size):
    if size.get("d") == 0 and drawn(mode).m:
        size = {"e": 0}  # there are no projections of nothing
    o, S, z, *grads = Call(drawn(mode, t=33, s=33, **size)).ours()
    assert not any(x.isnan().any() for x in (o, S, z, *grads))
    assert (o == 0).all()


def test_a_state_of_values_without_width_goes_on():
    """Its S has no numbers, and so no address, but its z has."""
    holds("decay a token, weighted", e=0, way="continued")
    holds("full, weighted", e=0, way="continued")


@pytest.mark.parametrize(("g", "r"), [(1, 3), (8, 1)])
@pytest.mark.parametrize("way", ["whole", "continued", "packed", "packed continued"])
@pytest.mark.parametrize("mode", MODES)
def test_many_chunks_and_stretches(mode, way, g, r):
    """A sequence of 41: of one head it becomes stretches of 8, of eight it stays one stretch of two segments.
    States go in and out."""
    way = way if drawn(mode).causal else way.removesuffix(" continued")  # which would read all keys twice
    holds(mode, b=1, g=g, r=r, t=41, s=41, d=6, e=5, tiny_chunks=True, way=way, seed=g)


@pytest.mark.parametrize("t", [1, 33, 1100])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_left_out_changes_no_bit(mode, t):
    """Nobody makes a state that is not asked for, or multiplies one that is zero: o and gradients are as with a state of zeros
    before, and with one behind whose gradient is zero. (1,100 positions are cut into two stretches.)"""
    call = Call(drawn(mode, b=1, g=1, t=t, s=t, d=8, e=8, dtype="float32"))
    f, log_scaled = call.drawn.features, call.drawn.weighted or call.feature_map.log_scaled
    before, results = LinearState.zeros(1, 1, f, 8, log_weights=log_scaled), []
    for state, return_state in product((None, before), (False, True)):
        q, k, v, *rest = leaves = [x.detach().requires_grad_() for x in call.inputs]
        options = dict(zip(call.names, rest)) | {"key_mask": call.mask, "state": state}
        how = {"causal": call.drawn.causal, "normalize": call.drawn.normalize, "return_state": return_state}
        found = linear_attention(q, k, v, call.feature_map, **options, **how)
        o, *behind = (found[0], found[1].S) if return_state else (found,)
        grads = [call.grads[0], *(torch.zeros_like(x) for x in behind)]
        results.append([o, *torch.autograd.grad([o, *behind], leaves, grads)])
    assert all(same_bits(results[0], others) for others in results[1:])


@pytest.mark.parametrize("mode", [mode for mode in MODES if drawn(mode).causal])
def test_states_that_forward_keeps_are_those_that_backward_would_make(mode):
    """To the bit; and backward reads them. 1,100 positions are two stretches, of two segments or more each."""
    given = Call(drawn(mode, b=1, g=1, t=1100, s=1100, d=8, e=8, dtype="float32"))
    options = dict(zip(given.names, given.inputs[3:])) | {"key_mask": given.mask}
    how = {"causal": True, "normalize": given.drawn.normalize, "eps": None}
    call = make_call(*given.inputs[:3], given.feature_map, **how, **options).call
    outputs = cpu.forward(call)
    returned = BackwardInputs(given.grads[0], None, None, *outputs[:2], None, None, None, None, False)
    kept = (outputs.kept, None, torch.zeros_like(outputs.kept))
    found = [cpu.backward(call, returned._replace(kept=x))[:3] for x in kept]
    assert same_bits(found[0], found[1])
    assert not same_bits(found[0], found[2])


def test_nobody_makes_a_state_that_is_not_asked_for(monkeypatch):
    """Nor its gradient, forward or backward, of the op or of a layer."""
    monkeypatch.setattr("tarnn.kernels.linear.Call.new_state", lambda call: pytest.fail("a state was made"))
    q, k, v = (torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3))
    linear_attention(q, k, v, causal=True).sum().backward()
    layer = LinearAttention(hidden_size=8, num_heads=2, feature_map=Elu(), causal=True)
    layer(torch.randn(1, 9, 8)).sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", sorted({WIDEST, "float32"}))
def test_weights_of_any_size(dtype):
    """Log-weights of ±3,000 and exponents of ±300: each sum in units of its largest term."""
    for mode in ("decay a token, weighted", "full, weighted"):
        holds(mode, dtype=dtype, spread=100.0)
    # the definition sums channels as they are, so that only weights within its range can be compared
    holds("decay a channel", feature_map="exp", masked=True, dtype=dtype, spread=100.0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_log_weight_of_minus_infinity_is_a_masked_key(causal):
    call = Call(drawn("causal", causal=causal, weighted=True, dtype="float32", state_grads=False))
    absent = torch.rand(2, 41) < 0.5
    absent[0, :20] = absent[1, :] = True  # none at first, and none at all
    call.inputs[3].masked_fill_(absent[:, None], -torch.inf)
    by_weight = call.ours()
    call.inputs[3].masked_fill_(absent[:, None], 0.0)
    call.mask = ~absent
    assert same_bits(by_weight, call.ours())
    assert (by_weight[0][1] == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_packed_sequences_are_a_loop_to_the_bit(mode):
    """Empty ones too; where none is cut into stretches."""
    cuts = [0, 0, 5, 5, 38, 38, 100, 100]
    call = Call(drawn(mode, b=1, t=100, s=100, way="packed", dtype="float32"))
    call.cuts, n = cuts, len(cuts) - 1
    f = call.drawn.features
    call.grads[1:] = [x.expand(n, *x.shape[1:]) for x in (torch.randn(1, 2, f, 33), torch.randn(1, 2, f))]
    o, S, z, *grads = call.ours()
    for i, (a, b) in enumerate(zip(cuts, cuts[1:])):
        alone = Call(drawn(mode, b=1, t=b - a, s=b - a, dtype="float32"))
        alone.inputs = [x if x.ndim == 1 else x[:, :, a:b] for x in call.inputs]
        alone.mask = None if call.mask is None else call.mask[:, a:b]
        alone.grads = [call.grads[0][:, :, a:b], *(x[i : i + 1] for x in call.grads[1:])]
        one = alone.ours()
        assert same_bits([o[:, :, a:b], S[i : i + 1], z[i : i + 1]], one[:3])
        in_time = [(x[:, :, a:b], y) for x, y in zip(grads, one[3:]) if x.ndim > 1]
        assert same_bits(*zip(*in_time))


# --- to the bit


@pytest.mark.parametrize("way", ["whole", "packed", "tiny", "side by side"])
@pytest.mark.parametrize("mode", MODES)
def test_same_bits_whatever_the_number_of_threads(mode, way):
    """Sequences of 1,100 are cut into stretches where there is one head; with tiny chunks, into many. Of five heads that lie
    side by side, one thread takes all together, two take fewer."""
    t = {"tiny": 150, "side by side": 140}.get(way, 1100)
    words = {"b": 1, "g": 1, "t": t, "s": t, "dtype": "float32", "way": "packed" if way == "packed" else "whole"}
    if way == "side by side":
        words |= {"g": 5, "d": 32, "e": 32, "layouts": ("as projected",) * 4}
    results = []
    for threads in (1, 2):
        call = drawn(mode, threads=threads, tiny_chunks=way == "tiny", **words)
        with set_up(call):
            results.append(Call(call).ours())
    assert same_bits(*results)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", [m for m in MODES if not m.startswith("full")])
def test_nothing_later_changes_an_output(mode, dtype):
    call = Call(drawn(mode, b=1, g=1, t=1100, s=1100, dtype=dtype, junk="", state_grads=False))
    for cut in (600, 13):  # in the second stretch of two, and in the first
        before = call.ours()[0][:, :, :cut]
        for x in call.inputs:
            if x.ndim > 1:
                x[:, :, cut:] = x[:, :, cut:].flip(2) * 1000
        assert same_bits([call.ours()[0][:, :, :cut]], [before])


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("layout", ["as projected", "every second", "wider", "expanded", "transposed"])
@pytest.mark.parametrize("mode", MODES)
def test_any_strides_give_the_same_bits(mode, layout, dtype):
    """As the contiguous copies, of which the kernel reads and writes some where they lie; gradients too."""
    strided = Call(drawn(mode, e=32, dtype=dtype, layouts=(layout,) * 4, state_grads=False))
    plain = Call(drawn(mode, e=32, dtype=dtype, state_grads=False))
    plain.inputs, plain.grads = ([x.contiguous() for x in xs] for xs in (strided.inputs, strided.grads))
    if strided.mask is not None:
        strided.mask = strided.mask.T.contiguous().T
    for i, x in enumerate(strided.inputs[3:]):  # a step of two along the last axis
        strided.inputs[3 + i] = torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0]
    assert not strided.inputs[0].is_contiguous()
    assert same_bits(strided.ours(), plain.ours())


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_without_strides(mode):
    """`o.sum()` sends one number back, seen everywhere."""
    call = Call(drawn(mode, dtype="float32", state_grads=False))
    call.grads = [torch.full((1, 1, 1, 1), 0.3).expand(call.grads[0].shape)]
    zero_strides = call.ours()
    call.grads = [call.grads[0].contiguous()]
    assert same_bits(zero_strides, call.ours())
