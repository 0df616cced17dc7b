"""The compiled kernels of the delta rule against its definition in float64."""

import pytest
import torch
from support.drawn_calls import excess

from tarnn.kernels.cpu import delta as compiled
from tarnn.kernels.delta import Call
from tarnn.ops.delta.op import compute

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("block", range(40, 120, 20))
def test_drawn_calls(block):
    """Outputs, states and gradients err no more than twice as much as the definition in that dtype."""
    assert [number for number in range(block, block + 20) if excess("delta", number) > 1] == []


def long(t=200, b=1, g=2, m=2, d=24, e=56, **options) -> Call:
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    q, k, v, beta = rand(b, g, t, d), rand(b, g, t, d), rand(b, m, t, e), rand(b, m, t).sigmoid()
    return Call(q, k, v, beta, -rand(b, m, t).abs(), scale=1.0, norm_eps=1e-6)._replace(**options)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_same_bits_on_any_number_of_threads(heads):
    """With fewer heads than threads, the columns of a head are computed side by side."""
    call, results, before = long(t=600, g=heads, m=2 * heads, d=64, e=150), [], torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        outputs = compiled.forward(call)
        grads = compiled.backward(call, compute.returned(outputs.o, outputs.S, None, None, outputs.kept))
        results.append([*outputs, *grads[:5]])
    torch.set_num_threads(before)
    assert all(torch.equal(x, y) for others in results for x, y in zip(others, results[0]))


def test_what_was_not_kept_is_computed_again():
    """As behind an operator of torch.compile, which hands on outputs alone."""
    call = long(t=600)
    outputs = compiled.forward(call)
    kept, again = (
        compiled.backward(call, compute.returned(outputs.o, None, None, None, kept)) for kept in (outputs.kept, None)
    )
    assert outputs.kept.shape[2] == 2
    assert all(torch.equal(x, y) for x, y in zip(kept[:5], again))
