"""What the compiled kernels make of memory: sixteen-bit numbers, rounding, scratch that holds rubbish."""

import ctypes
import sys

import pytest
import torch
from fuzz import set_up
from support.fuzz_calls import MAPS, Call
from support.kernel_calls import MODES, drawn, multiplied_in_bfloat16, same_bits

from tarnn.kernels.cpu import linear as cpu
from tarnn.kernels.linear import BackwardInputs
from tarnn.ops import LinearState, linear_attention
from tarnn.ops.linear.arguments import make_call

pytestmark = pytest.mark.usefixtures("compiled")

SIXTEEN = [torch.bfloat16, torch.float16]
TINIEST = torch.finfo(torch.float32).tiny


def passed_through(v):
    """One token a row, a feature that is 1: the output is v, and so is the state, in float32."""
    one = torch.ones(len(v), 1, 1, 1, dtype=v.dtype)
    options = {"causal": True, "normalize": False, "return_state": True}
    o, state = linear_attention(one, one, v[:, None, None], MAPS["identity"], **options)
    return o[:, 0, 0], state.S[:, 0, 0]


def flushed(x):
    """x in float32 with what is below its smallest normal number as zero: so the kernels compute."""
    x = x.float()
    return torch.where(x.abs() < TINIEST, 0.0, x)


@pytest.mark.parametrize("width", [256, 1, 13])
@pytest.mark.parametrize("dtype", SIXTEEN)
def test_every_sixteen_bit_number_comes_through(dtype, width):
    """All 65,536: numbers, subnormal ones, infinities, NaN; by whole vectors and by tails."""
    v = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    v = v[: len(v) // width * width].reshape(-1, width)
    o, S = passed_through(v)
    assert same_bits([S], [flushed(v)])
    assert same_bits([o], [flushed(v).to(dtype)])


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_sums_are_rounded_once_to_the_nearest_even(dtype):
    """A state's float32 numbers, read by a query that is 1: drawn bits, ties and their neighbours, what overflows."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 17,), generator=generator).to(torch.int32)
    last = 16 if dtype == torch.bfloat16 else 13  # bits that are rounded away
    ties = (bits >> last << last) + (1 << last - 1)
    edge = torch.tensor([65504.0, 65519.99, 65520.0, 65536.0, 3.3895e38, 3.3961e38, 3.4e38, 2**-25, 2**-24 * 1.5])
    S = torch.cat([*(x.view(torch.float32) for x in (bits, ties, ties - 1, ties + 1)), edge, -edge])
    S = flushed(S)
    none = torch.ones(1, 1, 1, 1, dtype=dtype)
    state = LinearState(S[None, None, None], torch.ones(1, 1, 1))
    o = linear_attention(
        none,
        none[:, :, :0],
        none.expand(1, 1, 1, len(S))[:, :, :0],
        MAPS["identity"],
        causal=False,
        normalize=False,
        state=state,
    )
    assert same_bits([o.flatten()], [S.to(dtype)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", MODES)
def test_sixteen_bits_cost_one_rounding(mode, dtype):
    """The same call in float32, to the bit, but that inputs and results are rounded: sums, gradients and all."""
    given = Call(drawn(mode, dtype=dtype, spread=0.3))
    if multiplied_in_bfloat16(given.drawn):
        pytest.skip("factors of products are rounded, too")
    a, (q, k, v) = given.drawn, given.inputs[:3]
    options = dict(zip(given.names, given.inputs[3:]))
    narrow = make_call(
        q, k, v, given.feature_map, causal=a.causal, normalize=a.normalize, eps=None, key_mask=given.mask, **options
    ).call
    wide = narrow._replace(**{x: getattr(narrow, x).float() for x in "qkv"})
    outputs, wide_outputs = cpu.forward(narrow), cpu.forward(wide)
    assert same_bits([outputs.o], [wide_outputs.o.to(outputs.o.dtype)])
    assert same_bits(outputs[1:5], wide_outputs[1:5])
    grad_o, grad_S, grad_z = given.grads
    returned = BackwardInputs(grad_o, grad_S.float(), grad_z.float(), *outputs[:5], None, wants_projection=False)
    grads = cpu.backward(narrow, returned)
    wide_grads = cpu.backward(wide, returned._replace(grad_o=grad_o.float(), o=outputs.o.float()))
    pairs = [(x, y.to(x.dtype)) for x, y in zip(grads, wide_grads) if x is not None]
    assert same_bits(*zip(*pairs))


@pytest.fixture
def malloc_gives_nan():
    """Bytes of memory from malloc are all ones, which is NaN in each type (where the C library is GNU's)."""
    libc = ctypes.CDLL(None)
    has_it = sys.platform == "linux" and hasattr(libc, "mallopt")
    if has_it:
        libc.mallopt(-6, 256)  # M_PERTURB: filled with the lowest byte's complement
    yield
    if has_it:
        libc.mallopt(-6, 0)


@pytest.mark.parametrize("way", ["whole", "continued", "packed", "stepped in place"])
@pytest.mark.parametrize("mode", MODES)
def test_memory_full_of_nan_leaves_no_trace(malloc_gives_nan, mode, way):
    """A larger call full of NaN, whose scratch memory the thread keeps, then a smaller one, cut into stretches."""
    words = {"b": 1, "g": 1, "dtype": "float32", "junk": ""}
    stepped = {"causal": True, "masked": False} if way.startswith("stepped") else {}
    small = drawn(mode, t=41, s=41, d=5, e=3, way=way, tiny_chunks=True, **words, **stepped)
    large = drawn(mode, t=64, s=64, d=67, e=70, **words, **stepped)
    with set_up(small):
        before = Call(small).ours()
    with set_up(large):
        full_of_nan = Call(large)
        for x in (*full_of_nan.inputs[:3], *full_of_nan.grads):
            x.fill_(torch.nan)
        assert full_of_nan.ours()[0][:, :, -1].isnan().all()
    with set_up(small):
        after = Call(small).ours()
    assert not any(x.isnan().any() for x in before)
    assert same_bits(after, before)
