"""The kernels of a first call, compiled side by side: Triton alone would compile each when it is launched.

A few positions of the call go through forward, or through backward, in items of one chunk, where every kernel takes part;
instead of being launched, kernels are compiled, by threads. Lengths, batches and numbers of heads are no part of what is
compiled, so this happens once for each kind of call: dtype, widths, feature map, options.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from tarnn.kernels.call import Call, Returned
from tarnn.kernels.triton.backward_pass import Backward
from tarnn.kernels.triton.configurations import values_at_once
from tarnn.kernels.triton.kinds import kind_of
from tarnn.kernels.triton.launch import Launches, forward, launching
from tarnn.kernels.triton.parts import EVERYTHING, Part

FEW = slice(0, 130)  # more than two of the longest chunks
MOST_THREADS = 8
_met: set[tuple] = set()


class _Compiled(Launches):
    """Launches that only compile."""

    def run(self, kernel, grid: tuple[int, ...], **more) -> None:
        named, options = self.named(kernel, more)
        with launching(kernel):
            kernel.warmup(grid=grid, **named, **options)

    def processors(self) -> int:
        return 2**20  # so sequences are cut


def compile_forward(call: Call) -> None:
    """All that a forward pass of this kind launches, unless one was met before."""
    _compile(call, "forward", lambda few: forward(few, True, _Compiled))


def compile_backward(call: Call) -> None:
    """The same of a backward pass."""
    _compile(call, "backward", _backward)


def _backward(few: Call) -> None:
    outputs: Any = few.new_outputs()
    S, z, M = (None, None, None) if few.causal else outputs[2:]
    projected = few.omega is not None
    returned = Returned(outputs.o, None, None, outputs.o, outputs.den, S, z, M, projected)
    Backward(few, returned, few.new_gradients(projected), _Compiled).run()


def _compile(call: Call, way: str, launch: Callable[[Call], object]) -> None:
    kind = (way, *kind_of(call))
    if kind in _met:
        return
    _met.add(kind)
    values = slice(0, values_at_once(call.q.dtype, call.num_features) if way == "backward" else None)
    two = slice(0, 2)  # one would have no stride
    few = Part(
        b=two,
        n=two if call.cu_seqlens is None else slice(0, 1),
        g=EVERYTHING,
        h=EVERYTHING,
        e=values,
        t=FEW,
        s=FEW,
    ).call(call)
    if call.cu_seqlens is not None:
        few = few._replace(cu_seqlens=torch.tensor([0, few.q.shape[2]], dtype=torch.int32))
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    # an error waits in the kernel and is raised when that is launched; raised here it would leave Triton in this mode
    with threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        launch(few)
