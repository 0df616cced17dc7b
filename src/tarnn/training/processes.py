"""Several processes that train one model: who writes, what all must agree on, and sharded weights."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from tarnn.errors import LostRankError, UserError

T = TypeVar("T")
GONE = (  # what gloo says where another process has died, or takes longer than the timeout
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
)


def distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shared(*numbers: float) -> list[float]:
    """Return the first process's numbers, on all of them."""
    values = torch.tensor(numbers, dtype=torch.float64, device=device())
    if distributed():
        torch.distributed.broadcast(values, src=0)
    return values.tolist()


def largest(number: int) -> int:
    """Return the largest of all processes' numbers. All of them must ask at the same time."""
    if not distributed():
        return number
    value = torch.tensor(int(number), device=device())
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return int(value)


def device() -> str | None:
    """The device of what processes send each other: NCCL sends from GPUs alone."""
    return "cuda" if distributed() and torch.distributed.get_backend() == "nccl" else None


def gathered(thing: Any) -> list[Any]:
    """Return every process's thing, in the order of their ranks."""
    if not distributed():
        return [thing]
    things: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(things, thing)
    return things


def everywhere(work: Callable[[], T]) -> T:
    """Do `work` on every process, and return its result; where it fails on one of them, raise on all.

    A process that has failed raises its own error, the others a UserError with the words of the first that has.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:
        failure = error
    words = gathered(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    failed = next((rank for rank, text in enumerate(words) if text is not None), None)
    if failed is not None:
        raise UserError(f"process {failed} of {len(words)}: {words[failed]}")
    return result  # type: ignore[return-value]


def refuse_disagreement(what: str, facts: dict[str, Any]) -> None:
    """UserError, on all processes, where one of them has other facts than the first: it would train something else."""
    every = gathered(facts)
    for rank, others in enumerate(every):
        for name, value in every[0].items():
            if others[name] != value:
                raise UserError(
                    f"process {rank} of {len(every)} has other {what} than process 0: {name} is {others[name]!r:.200} there "
                    f"and {value!r:.200} here; start all of them by the same command, on the same data."
                )


def is_loss(error: BaseException) -> bool:
    """Whether an error means that another process has gone, or can't be reached."""
    if isinstance(error, UserError) or not torch.distributed.is_available():
        return False
    if isinstance(error, LostRankError | torch.distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in GONE)


def part() -> None:
    """Leave the others, at the end of a command: threads of torch's that outlive Python can end a process with an error."""
    if distributed():
        torch.distributed.destroy_process_group()


def of_process() -> str:
    """Return "process 1 of 4: ", and nothing where there is one."""
    if not distributed() or torch.distributed.get_world_size() == 1:
        return ""
    return f"process {torch.distributed.get_rank()} of {torch.distributed.get_world_size()}: "


def shard_on_cpu(accelerator: Accelerator, args: TrainingArguments) -> None:
    """Turn sharding on in an accelerator of CPU processes, in the way that it has for GPUs."""
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def local(parameter: Tensor) -> Tensor:
    """A parameter, or the shard of it that is here."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
