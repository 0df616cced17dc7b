"""Calls that the compiled kernels find no memory for: each must raise, and then, with memory, do as if nothing had been.

Prints the calls' names. `test_cpu_edges.py` runs it, since the limit is the whole process's.
"""

import resource
from contextlib import contextmanager
from pathlib import Path

import torch

from tarnn.feature_maps import Identity, PositiveRandomFeatures
from tarnn.ops import LinearState, linear_attention, step


@contextmanager
def no_more_than(megabytes: int):
    """So much more address space than there is."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def of_a_thread():
    """A tile of each thread's own: rows of a million channels."""
    x = torch.randn(1, 2, 1, 1 << 20)
    return lambda: [linear_attention(x, x, x[..., :1], Identity(), causal=True, normalize=False)]


def of_the_whole():
    """The sums of the keys, beside the state that is returned: 64 MB each."""
    x = torch.randn(64, 4, 1, 256)
    return lambda: [linear_attention(x, x, x, Identity(), causal=False, normalize=False, return_state=True)[0]]


def of_backward():
    """A gradient of Ω for each of 2,000 rows: 160 MB."""
    x, phi = torch.randn(2000, 1, 1, 64, requires_grad=True), PositiveRandomFeatures(64, seed=0)
    phi.omega.requires_grad_()
    o = linear_attention(x, x, x[..., :1], phi, causal=True)
    return lambda: torch.autograd.grad(o.sum(), [x, phi.omega], retain_graph=True)


def of_a_step():
    """In place, from the same state each time: it is not touched where there is no memory."""
    x, S = torch.randn(1, 1, 1, 1 << 22), torch.randn(1, 1, 1 << 22, 1)
    state, start = LinearState(S, S[..., 0].clone()), S.clone()

    def stepped():
        assert torch.equal(S, start)
        o, _ = step(x, x, x[..., :1], Identity(), state, normalize=False, inplace=True)
        after = [o, S.clone(), state.z.clone()]
        S.copy_(start)
        state.z.copy_(start[..., 0])
        return after

    return stepped


def raises_once(run, megabytes: int) -> bool:
    """Whether it raised for want of memory, with a sentence, and then, with memory, computed the same as before."""
    expected = run()
    said = ""
    try:
        with no_more_than(megabytes):
            run()
    except RuntimeError as error:
        said = str(error)
    return "the compiled kernels asked for" in said and all(
        torch.equal(x, y) for x, y in zip(run(), expected, strict=True)
    )


torch.set_num_threads(2)
torch.ones(1 << 20).add_(1)  # threads take address space too
for prepare, megabytes in ((of_a_thread, 60), (of_the_whole, 100), (of_backward, 100), (of_a_step, 60)):
    assert raises_once(prepare(), megabytes), prepare.__name__
    print(prepare.__name__)
