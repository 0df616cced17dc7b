"""The kernels of a first call, compiled side by side: Triton alone would compile each when it is launched.

A few positions of the call go through forward and backward in two items, where every kernel takes part; instead of being
launched, kernels are compiled, by threads. Lengths, batches and numbers of heads are no part of what is compiled, so this
happens once for each kind of call: dtype, widths, feature map, options.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton

from tarnn.kernels.call import Call, Returned
from tarnn.kernels.triton.backward_pass import Backward
from tarnn.kernels.triton.launch import Launches, forward
from tarnn.kernels.triton.parts import EVERYTHING, Part

FEW = slice(0, 130)  # more than two of the longest chunks
MOST_THREADS = 8
_met: set[tuple] = set()


class _Compiled(Launches):
    """Launches that only compile."""

    def run(self, kernel, grid: tuple[int, ...], **more) -> None:
        named, options = self.named(kernel, more)
        kernel.warmup(grid=grid, **named, **options)

    def processors(self) -> int:
        return 2**20  # so sequences are cut


def kind_of(call: Call, for_backward: bool) -> tuple:
    """What the kernels of a call depend on, but for how tensors lie in memory."""
    widths = call.q.shape[3], call.num_features, call.v.shape[3], call.q.shape[1] == call.k.shape[1]
    return (for_backward, call.q.device, call.q.dtype, widths, call.has_channels, *call.form)


def compile_together(call: Call, for_backward: bool) -> None:
    """All that a call of this kind launches, unless one was met before."""
    kind = kind_of(call, for_backward)
    if kind in _met or (kind_of(call, True) in _met):
        return
    _met.add(kind)
    few = Part(b=slice(0, 1), n=slice(0, 1), g=EVERYTHING, h=EVERYTHING, e=slice(0, 256), t=FEW, s=FEW).call(
        call
    )
    if call.cu_seqlens is not None:
        few = few._replace(cu_seqlens=torch.tensor([0, few.q.shape[2]], dtype=torch.int32))
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    with threads, triton.AsyncCompileMode(threads):
        outputs: Any = forward(few, for_backward, _Compiled)
        if for_backward:
            S, z, M = (None, None, None) if call.causal else outputs[2:]
            projected = call.omega is not None
            returned = Returned(outputs.o, None, None, outputs.o, outputs.den, S, z, M, projected)
            Backward(few, returned, few.new_gradients(projected), _Compiled).run()
