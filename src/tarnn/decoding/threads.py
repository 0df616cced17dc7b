"""How many threads one step of a model should use on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tarnn.decoding.contents import OfModule
from tarnn.decoding.opened import Opened

SMALL = 10_000_000  # parameters: a step reads them once, a few milliseconds for one core


@contextmanager
def threads_for_steps(model: nn.Module | Opened) -> Iterator[None]:
    """Within: one thread for a small model on a CPU. Elsewhere torch's number stays as it is.

    A step of a small model is many operations of a few microseconds, in which a second thread gains next to
    nothing. But it waits for the first by spinning, and where another program wants the core, every
    operation takes until the scheduler's next turn: measured on two busy cores, 600 ms per token instead of 6.
    """
    before = torch.get_num_threads()
    weights = OfModule(model) if isinstance(model, nn.Module) else model
    if weights.num_parameters < SMALL and weights.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
