"""The compiled step: it is what linear attention computes for one token, in any dtype and layout, in place or not."""

import pytest
import torch
from support.attention_cases import relative_error
from support.fuzz_calls import MAPS, laid_out
from support.kernel_calls import DTYPES, MODES, holds, same_bits

from tarnn.ops import LinearState, linear_attention, step

pytestmark = pytest.mark.usefixtures("compiled")

STEPPED = [m for m in MODES if not m.startswith("full")]
WEIGHTS = {
    "plain": lambda rand, d: {},
    "weighted": lambda rand, d: {"key_log_weight": rand(3, 2, 1), "log_decay": -rand(3, 2, 1).abs()},
    "channels": lambda rand, d: {"log_decay": -rand(3, 2, 1, d).abs()},
}


def one_token(weights: str, dtype=torch.float32, d: int = 17, e: int = 33):
    """q, k, v of six query and two key heads, a state that has seen keys, and options."""
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    q, k, v = (rand(*shape).to(dtype) for shape in ((3, 6, 1, d), (3, 2, 1, d), (3, 2, 1, e)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    M = [rand(3, 2).to(wide)] if weights == "weighted" else []
    state = LinearState(rand(3, 2, d, e).to(wide), rand(3, 2, d).abs().to(wide), *M)
    options = {n: x.to(dtype).to(wide) for n, x in WEIGHTS[weights](rand, d).items()}
    return q, k, v, MAPS["elu"], state, options


@pytest.mark.parametrize("way", ["stepped", "stepped in place"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", STEPPED)
def test_steps_are_the_definition(mode, dtype, way):
    holds(mode, dtype=dtype, way=way, t=9, masked=False, junk="")


@pytest.mark.parametrize(("d", "e"), [(1, 16), (16, 1), (3, 15), (31, 17), (17, 33), (33, 48), (64, 65), (65, 130)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_width(weights, d, e):
    """Against the parallel form in float64; float32 has vectors of another length."""
    for dtype in (torch.float64, torch.float32):
        most = 64 * torch.finfo(dtype).eps
        q, k, v, phi, state, options = one_token(weights, dtype, d, e)
        o, after = step(q, k, v, phi, state, **options)
        expected, end = linear_attention(
            *(x.double() for x in (q, k, v)),
            phi,
            causal=True,
            state=state.map(torch.Tensor.double),
            return_state=True,
            **options,
        )
        assert relative_error(o, expected) < most
        for name, x in after.tensors().items():
            assert relative_error(x, end.tensors()[name]) < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_sixteen_bits_cost_one_rounding(weights, dtype):
    q, k, v, phi, state, options = one_token(weights, dtype)
    o, after = step(q, k, v, phi, state, **options)
    wide_o, wide_after = step(q.float(), k.float(), v.float(), phi, state, **options)
    assert same_bits([o], [wide_o.to(dtype)])
    assert same_bits(after.tensors().values(), wide_after.tensors().values())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["as projected", "every second", "wider", "transposed"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_any_strides_give_the_same_bits(weights, layout, inplace):
    """Of q, k, v, of the state that is read and, in place, of the state that is written."""
    q, k, v, phi, state, options = one_token(weights)
    expected, end = step(q, k, v, phi, state, **options)
    strided = LinearState(laid_out(state.S, layout), laid_out(state.z[..., None], layout)[..., 0], state.M)
    before = strided.map(torch.clone)
    q, k, v = (laid_out(x, layout) for x in (q, k, v))
    o, after = step(q, k, v, phi, strided, inplace=inplace, **options)
    assert same_bits([o, after.S, after.z], [expected, end.S, end.z])
    held = end if inplace else before
    assert same_bits(strided.tensors().values(), held.tensors().values())


@pytest.mark.parametrize("inplace", [False, True])
def test_no_rows(inplace):
    x, state = torch.ones(0, 2, 1, 4), LinearState.zeros(0, 2, 4, 4)
    o, after = step(x, x, x, MAPS["elu"], state, inplace=inplace)
    assert o.shape == (0, 2, 1, 4)
    assert after.S.shape == (0, 2, 4, 4)


def test_same_bits_whatever_the_number_of_threads():
    """A batch whose states are several tasks' work."""
    q = k = v = torch.randn(40, 8, 1, 64)
    state = LinearState(torch.randn(40, 8, 64, 64), torch.rand(40, 8, 64))
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        o, after = step(q, k, v, MAPS["elu"], state)
        results.append([o, after.S, after.z])
    torch.set_num_threads(before)
    assert same_bits(*results)
