"""Attention in bfloat16, at widths of whole vectors.

Where the processor multiplies bfloat16, products have such factors. The laws are the same everywhere."""

import pytest
import torch
from fuzz import set_up
from support.fuzz_calls import Call
from support.kernel_calls import drawn, holds, same_bits

from tarnn.ops import linear_attention

pytestmark = pytest.mark.usefixtures("compiled")

MODES = [
    "causal", "full", "full, weighted", "decay a token, weighted", "decay a head", "unnormalised",
    "random features",
]  # fmt: skip
WHOLE = {"b": 1, "g": 1, "d": 64, "e": 64, "dtype": "bfloat16"}


@pytest.mark.parametrize("mode", MODES)
def test_the_error_is_at_most_twice_the_definitions(mode):
    holds(mode, t=130, s=130, **WHOLE)


@pytest.mark.parametrize("mode", ["causal", "full", "decay a head"])
def test_without_values_gradients_come_through_z(mode):
    holds(mode, t=70, s=70, state_grads=True, **(WHOLE | {"e": 0}))


def test_a_state_is_a_sum_in_float32():
    """Of 1,000 ones, where a sum kept in bfloat16 would stay at 256; from chunk to chunk, and from stretch to stretch."""
    for heads in (1, 8):
        one = torch.ones(1, heads, 1100, 32, dtype=torch.bfloat16)
        o, state = linear_attention(one, one, one, "identity", causal=True, normalize=False, return_state=True)
        assert same_bits([state.S, state.z], [torch.full_like(state.S, 1100), torch.full_like(state.z, 1100)])
        assert torch.allclose(o[0, 0, :, 0].double(), 32 * torch.arange(1.0, 1101).double(), rtol=2**-7)


@pytest.mark.parametrize("layout", ["as projected", "every second", "transposed"])
@pytest.mark.parametrize("mode", MODES[:4])
def test_any_strides_give_the_same_bits(mode, layout):
    strided = Call(drawn(mode, t=70, s=70, layouts=(layout,) * 4, state_grads=False, **(WHOLE | {"g": 2})))
    plain = Call(drawn(mode, t=70, s=70, state_grads=False, **(WHOLE | {"g": 2})))
    plain.inputs, plain.grads = ([x.contiguous() for x in xs] for xs in (strided.inputs, strided.grads))
    assert not strided.inputs[0].is_contiguous()
    assert same_bits(strided.ours(), plain.ours())


@pytest.mark.parametrize("mode", MODES)
def test_same_bits_whatever_the_number_of_threads(mode):
    results = []
    for threads in (1, 2):
        call = drawn(mode, t=1100, s=1100, threads=threads, **(WHOLE | {"d": 32, "e": 32}))
        with set_up(call):
            results.append(Call(call).ours())
    assert same_bits(*results)


def test_packed_sequences_have_the_bits_that_they_have_alone():
    torch.manual_seed(0)
    cuts = [0, 1, 33, 97, 100]
    q, k, v, grad = (torch.randn(1, 2, 100, 64).bfloat16() for _ in range(4))

    def attend(*inputs, grad, **options):
        inputs = [x.clone().requires_grad_() for x in inputs]
        o = linear_attention(*inputs, causal=True, **options)
        return [o, *torch.autograd.grad(o, inputs, grad)]

    packed = attend(q, k, v, grad=grad, cu_seqlens=torch.tensor(cuts, dtype=torch.int32))
    for a, b in zip(cuts, cuts[1:]):
        alone = attend(*(x[:, :, a:b] for x in (q, k, v)), grad=grad[:, :, a:b])
        assert same_bits([x[:, :, a:b] for x in packed], alone)
