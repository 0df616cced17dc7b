"""The kernels of a first call, compiled side by side: Triton alone would compile each when it is launched.

A few positions of the call go through forward, or through backward, in items of one chunk, where every kernel takes part;
instead of being launched, kernels are compiled, by threads. Nobody waits here: a launch waits for its own kernel. A forward
pass that will have a backward pass hands in both, so that the second is compiled while the first runs. Lengths, batches and
numbers of heads are no part of what is compiled, so this happens once for each kind of call: dtype, widths, feature map,
options.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime import _async_compile

from tarnn.kernels.linear import Call, Returned
from tarnn.kernels.triton.backward_pass import Backward
from tarnn.kernels.triton.configurations import values_at_once
from tarnn.kernels.triton.launch import Launches, forward, launching
from tarnn.kernels.triton.launch_failures import kind_of
from tarnn.kernels.triton.split_backward import EVERYTHING, Part

FEW = slice(0, 130)  # more than two of the longest chunks
MOST_THREADS = 8
_met: set[tuple] = set()


class _Handed(triton.AsyncCompileMode):
    """In here, kernels are handed to the threads. Triton's own mode would wait for them, and not end if one fails."""

    def __exit__(self, *_) -> None:
        _async_compile.active_mode.set(None)


@cache
def threads() -> ThreadPoolExecutor:
    """First in, first out."""
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))


class _Compiled(Launches):
    """Launches that only compile."""

    def run(self, kernel, grid: tuple[int, ...], **more) -> None:
        named, options = self.named(kernel, more)
        with launching(kernel):
            kernel.warmup(grid=grid, **named, **options)

    def processors(self) -> int:
        return 2**20  # so sequences are cut


def compile_forward(call: Call, for_backward: bool) -> None:
    """All that a forward pass of this kind launches, unless one was met before; and then a backward pass."""
    _compile(call, "forward", lambda few: forward(few, True, _Compiled))
    if for_backward:
        compile_backward(call)


def compile_backward(call: Call) -> None:
    _compile(call, "backward", _backward)


def _backward(few: Call) -> None:
    outputs: Any = few.new_outputs()
    returned = Returned.of(few, outputs, outputs.o)
    Backward(few, returned, few.new_gradients(returned), _Compiled).run()


def _compile(call: Call, way: str, launch: Callable[[Call], object]) -> None:
    kind = (way, *kind_of(call))
    if kind in _met:
        return
    _met.add(kind)
    values = slice(0, values_at_once(call.q.dtype, call.num_features) if way == "backward" else None)
    two = slice(0, 2)  # one would have no stride
    few = Part(
        b=two, n=two if call.cu_seqlens is None else slice(0, 1), g=EVERYTHING, h=EVERYTHING, e=values, t=FEW, s=FEW
    ).call(call)
    if call.cu_seqlens is not None:
        few = few._replace(cu_seqlens=torch.tensor([0, few.q.shape[2]], dtype=torch.int32))
    with _Handed(threads()):
        launch(few)
