"""What the compiled kernels make of the extreme: strong decays, empty axes, junk where nobody looks, NaN to come."""

import contextlib
import copy
import itertools
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from fuzz import judge
from support.attention_cases import Case, relative_error
from support.chunks import tiny_chunks
from support.fuzz_calls import Call, draw
from support.kernel_calls import DTYPES, MODES, drawn, holds, same_bits
from torch.nn.functional import elu

from tarnn.kernels.cpu import library
from tarnn.ops import linear_attention
from tarnn.ops.linear import definition as linear_definition

pytestmark = pytest.mark.usefixtures("compiled")

TESTS = Path(__file__).parents[1]
JUNK = [torch.nan, torch.inf, -torch.inf]
CAUSAL = [mode for mode in MODES if not mode.startswith("full")]


@pytest.mark.parametrize("steep", [5.0, 6.0, 20.0, 100.0, math.inf])
@pytest.mark.parametrize("d", [8, 15, 20, 24, 66])
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_that_decay_more_than_new_keys_weigh(dtype, d, steep):
    """The running maximum is then that of old keys, and the room behind the last channel is not in its units."""
    holds("decay a channel, weighted", dtype=dtype, d=d, steep=steep, masked=False)


@pytest.mark.parametrize("chunks", [contextlib.nullcontext, tiny_chunks])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_the_size_of_log_weights_costs_no_accuracy(decay, chunks):
    """A thousand more on each of them changes nothing: where the maximum M only decays, its roundings are made good."""
    case = Case(b=1, g=2, r=1, t=300, decay=decay, weighted=True, dtype=torch.float32)
    w = (case.options.pop("key_log_weight") * 64).round() / 1024  # as many bits as w + 1024 has room for
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    options = {"log_decay": case.options["log_decay"].float() / 64, "key_log_weight": w.float()}

    def results(attend, dtype, shift):
        given = {n: x.to(dtype) for n, x in options.items()} | {"key_log_weight": w.to(dtype) + shift}
        o = attend(q.to(dtype), k.to(dtype), v.to(dtype), **given)
        return [o, *torch.autograd.grad(o.sin().sum(), (q, k, v))]

    def definition(q, k, v, **given):
        return linear_definition.recurrent(elu(q) + 1, elu(k) + 1, v, eps=1e-30, **given)[0]

    exact, theirs = (results(definition, dtype, 0.0) for dtype in (torch.float64, torch.float32))
    with chunks():
        ours = results(partial(linear_attention, causal=True), torch.float32, 1024.0)
    for x, y, z in zip(ours, theirs, exact, strict=True):
        assert relative_error(x, z) <= 2 * relative_error(y, z) + torch.finfo(torch.float32).eps


@pytest.mark.parametrize("number", [4944, 8197, 8646])
def test_gradients_cross_stretches_in_the_units_of_each(number):
    """M behind a stretch, found position by position, and as stretches are joined differs by roundings of a large M."""
    assert not judge(draw(0, number))[2]


EMPTY = ["b", *("".join(axes) for n in (1, 2, 3, 4) for axes in itertools.combinations("trde", n))]


@pytest.mark.parametrize("axes", EMPTY)
@pytest.mark.parametrize("mode", MODES)
def test_every_combination_of_empty_axes(mode, axes):
    """All results are written, and nothing is read that isn't there. r = 0: key/value heads without query heads."""
    axes = axes.replace("d", "") if drawn(mode).m else axes  # there are no projections of nothing
    size = {"t": 33, "s": 33} | dict.fromkeys(axes, 0)
    if axes != "b" and "d" not in axes:  # which the definition can't do
        holds(mode, **size)
    results = Call(drawn(mode, **size)).ours()
    assert not any(x.isnan().any() for x in results)
    assert "d" not in axes or all((x == 0).all() for x in results[:3])


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("mode", MODES)
def test_what_lies_at_masked_keys_stays_there(mode, junk):
    """In keys, values, decays and log-weights: the same bits as with zeros, in results, sums and gradients."""
    results = []
    for value in (0.0, junk):
        call = Call(drawn(mode, dtype="float32", masked=True, junk=""))
        for x in call.inputs[1:]:
            absent = ~call.mask[:, None].reshape(2, 1, 41, *[1] * (x.ndim - 3))
            x.copy_(x if x.ndim == 1 else x.masked_fill(absent, value))
        results.append([*call.ours(), *gradients_of_the_map(call)])
    assert not any(x.isnan().any() for x in results[1])
    assert same_bits(*results)


def gradients_of_the_map(call):
    """The gradient of Ω, through β too where that is made of it."""
    if not call.drawn.m:
        return []
    call.feature_map = copy.deepcopy(call.feature_map)
    omega = call.feature_map.omega.requires_grad_()
    options = dict(zip(call.names, call.inputs[3:])) | {"key_mask": call.mask}
    o, _ = call._whole(*call.inputs[:3], options)
    return torch.autograd.grad(o, omega, call.grads[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", CAUSAL)
def test_a_later_nan_reaches_no_earlier_output(mode, dtype):
    """In the same chunk either: in keys, values, decays and log-weights."""
    words = {"dtype": dtype, "b": 1, "g": 1, "junk": "", "masked": False, "state_grads": False}
    for junk, cut in itertools.product(JUNK, (1, 7, 20, 37)):
        call = Call(drawn(mode, **words))
        before = call.ours()[0][:, :, :cut]
        for x in call.inputs[1:]:
            if x.ndim > 1:
                x[:, :, cut:] = junk
        assert same_bits([call.ours()[0][:, :, :cut]], [before])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_decay_for_each_head_is_rounded_once(dtype):
    """The sum over positions, not each of its terms."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 32, 64, 8, generator=generator).to(dtype) for _ in range(4))
    narrow = (-0.01 * torch.rand(32, generator=generator)).to(dtype)
    grads = []
    for log_decay in (narrow, narrow.float()):
        o = linear_attention(q, k, v, causal=True, log_decay=log_decay.requires_grad_())
        grads.append(torch.autograd.grad(o, log_decay, grad)[0].to(dtype))
    assert same_bits(*zip(grads))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is set and read as Linux does it")
@pytest.mark.skipif("ASAN_OPTIONS" in os.environ, reason="the sanitizer ends a process that has no memory left")
def test_without_memory_a_call_raises_and_harms_nothing():
    run = subprocess.run(
        [sys.executable, TESTS / "support/out_of_memory.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert run.stdout.split() == ["of_a_thread", "of_the_whole", "of_backward", "of_a_step"], run.stderr


def test_the_maximum_decays_once_where_there_are_no_features():
    """M goes on across stretches also where a map has no features: what it decays by was counted twice there."""
    torch.manual_seed(0)
    q, v = torch.randn(1, 1, 4096, 0), torch.randn(1, 1, 4096, 2)
    options = {"causal": True, "log_decay": torch.full((1, 1, 4096), -0.01), "key_log_weight": torch.zeros(1, 1, 4096)}
    options["key_log_weight"][:, :, 0] = 100.0

    def maximum():
        return linear_attention(q, q, v, "identity", normalize=False, return_state=True, **options)[1].M

    ours = maximum()
    with library.disabled():
        assert torch.allclose(ours, maximum(), atol=1e-2)
    assert abs(ours.item() - (100.0 - 0.01 * 4095)) < 0.1
