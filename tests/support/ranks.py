"""Processes that share sequences, by gloo on this machine: started once, they run the functions that tests name."""

import io
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# one process imports these, and all ranks are forked from it: each by itself would take longer to start than to be tested
PRELOADED = [
    "torch.distributed.device_mesh",
    "tarnn.huggingface.registered",
    "tarnn.models.rwkv",
    "tarnn.parallel.wrapping",
]
SECONDS = 300  # that a start or a test's function may take, at most: on a busy machine each takes many times as long


class Raised(NamedTuple):
    """What a function raised on one rank."""

    kind: str
    message: str
    trace: str


class Processes:
    """`size` processes, in groups of which functions run, as function(group, rank, *arguments): by default the first n.

    timeout: the groups' own, in seconds.
    """

    def __init__(self, size: int, timeout: float = 120, groups: tuple[tuple[int, ...], ...] = ()):
        groups = groups or tuple(tuple(range(n)) for n in range(1, size + 1))
        self.folder = tempfile.TemporaryDirectory(prefix="tarnn-ranks-")
        store = str(Path(self.folder.name) / "store")
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.ends, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, store, rank, size, groups, timeout), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)
        try:
            for end in self.ends:
                _receive(end, SECONDS)  # it has joined
        except BaseException:
            self.close()
            raise

    def send(self, function: Callable, *arguments: Any, members: tuple[int, ...]) -> None:
        """Let the ranks of a group run a function."""
        for rank in members:
            _send(self.ends[rank], (function.__module__, function.__qualname__, members, arguments))

    def receive(self, rank: int) -> Any:
        """What the function returned there, or `Raised`."""
        return _receive(self.ends[rank], SECONDS)

    def outcomes(self, function: Callable, *arguments: Any, ranks: int = 0) -> list[Any]:
        """What a function returned on each of the first `ranks` ranks (0: on all), or `Raised`."""
        members = tuple(range(ranks or len(self.ends)))
        self.send(function, *arguments, members=members)
        return [self.receive(rank) for rank in members]

    def run(self, function: Callable, *arguments: Any, ranks: int = 0) -> list[Any]:
        """What a function returned on each rank."""
        outcomes = self.outcomes(function, *arguments, ranks=ranks)
        for outcome in outcomes:
            assert not isinstance(outcome, Raised), outcome.trace
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _send(end: Any, message: Any) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    end.send_bytes(buffer.getvalue())


def _receive(end: Any, seconds: float) -> Any:
    if not end.poll(seconds):
        raise TimeoutError(f"a rank has not answered for {seconds} s")
    return torch.load(io.BytesIO(end.recv_bytes()), weights_only=False)


def _serve(end: Any, store: str, rank: int, size: int, groups: Any, timeout: float) -> None:
    """Run what comes through the pipe, until it is closed."""
    import importlib

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    start, limit = timedelta(seconds=SECONDS), timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=start)
    group_of = {members: dist.new_group(list(members), timeout=limit) for members in groups}
    _send(end, "joined")
    while True:
        try:
            module, name, members, arguments = _receive(end, 3600)
        except (EOFError, OSError, TimeoutError):
            return
        try:
            answer = getattr(importlib.import_module(module), name)(group_of[members], members.index(rank), *arguments)
        except Exception as error:
            answer = Raised(type(error).__name__, str(error), traceback.format_exc())
        _send(end, answer)
