"""Exchanges between ranks: tensors gathered or added, with gradients of any order.

The gradient of a gather is an exchange of as many bytes, whose sums are taken in the order of ranks: the same bits each time.
Every rank has to take part in every exchange, also backward; `tied` makes it so.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tarnn.errors import LostRankError, UserError
from tarnn.parallel.group import Ranks


def gather(ranks: Ranks, *tensors: Tensor | None) -> list[Any]:
    """Gather each of these tensors from all ranks, (ranks, …), in one message; None stays None.

    They have the same shapes on all ranks, one floating dtype and one device.
    """
    parts = [x for x in tensors if x is not None]
    everything = _Gather.apply(ranks, torch.cat([x.flatten() for x in parts]))
    pieces = zip(parts, everything.split([x.numel() for x in parts], 1))
    gathered = iter([piece.unflatten(1, x.shape) for x, piece in pieces])
    return [None if x is None else next(gathered) for x in tensors]


def add(ranks: Ranks, *tensors: Tensor | None) -> list[Any]:
    """Sum these tensors over all ranks, in one message; None stays None. As for `gather`."""
    parts = [x for x in tensors if x is not None]
    everything = _Add.apply(ranks, torch.cat([x.flatten() for x in parts]))
    pieces = zip(parts, everything.split([x.numel() for x in parts]))
    added = iter([piece.view(x.shape) for x, piece in pieces])
    return [None if x is None else next(added) for x in tensors]


@torch.no_grad()
def largest(ranks: Ranks, x: Tensor) -> Tensor:
    """Return the elementwise maximum over all ranks, a constant under autograd."""
    return _reduced(ranks, x, dist.ReduceOp.MAX)


def tied(x: Tensor, gathered: Tensor) -> Tensor:
    """Return x, whose backward pass waits for that of `gathered`: for ranks that use nothing of what they took part in."""
    return _Tied.apply(x, gathered) if gathered.requires_grad else x


def gather_plain(ranks: Ranks, x: Tensor) -> Tensor:
    """Gather x from all ranks, (ranks, …), outside of autograd."""
    everything = x.new_empty(ranks.size, x.numel())
    _exchange(ranks, "all_gather", dist.all_gather, list(everything), x.flatten())
    ranks.bytes_sent += (ranks.size - 1) * x.nbytes
    return everything.view(ranks.size, *x.shape)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, x):
        ctx.ranks = ranks
        return gather_plain(ranks, x)

    @staticmethod
    def backward(ctx, grad):
        return None, _AddScattered.apply(ctx.ranks, grad)


class _AddScattered(torch.autograd.Function):
    """Sum over ranks what each has for this one; x (ranks, …)."""

    @staticmethod
    def forward(ctx, ranks, x):
        ctx.ranks = ranks
        x = x.contiguous()
        received = torch.empty_like(x)
        _exchange(ranks, "all_to_all", dist.all_to_all_single, received, x)
        ranks.bytes_sent += (ranks.size - 1) * x[0].nbytes
        return received.sum(0)

    @staticmethod
    def backward(ctx, grad):
        return None, _Gather.apply(ctx.ranks, grad)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ranks, x):
        ctx.ranks = ranks
        return _reduced(ranks, x, dist.ReduceOp.SUM)

    @staticmethod
    def backward(ctx, grad):
        return None, _Add.apply(ctx.ranks, grad)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gathered):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _reduced(ranks: Ranks, x: Tensor, operation: Any) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _exchange(ranks, "all_reduce", dist.all_reduce, total, operation)
    ranks.bytes_sent += 2 * (ranks.size - 1) * x.nbytes // ranks.size
    return total


_GONE = ("connection", "timed out", "timeout", "broken pipe", "peer", "socket", "remote process")


def _exchange(ranks: Ranks, name: str, function: Callable, *arguments: Any) -> None:
    """Call a function of torch.distributed; errors say what happened, and what to do."""
    try:
        function(*arguments, group=ranks.process_group)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if any(sign in str(error).lower() for sign in _GONE):
            rank = dist.get_rank(ranks.process_group)
            raise LostRankError(
                f"rank {rank} of {ranks.size} waited for the others in {name}: one of them ended, or did not come within "
                f"the group's timeout. Look at its own messages; then start all ranks again ({reason})."
            ) from error
        x = arguments[-1] if isinstance(arguments[-1], Tensor) else arguments[0]
        raise UserError(
            f"a sequence over several ranks needs {name} of {x.dtype} on {x.device.type}, and the group's backend, "
            f'{dist.get_backend_config(ranks.process_group)}, lacks it ({reason}). Call init_process_group("gloo") for CPUs, '
            '"cpu:gloo,cuda:nccl" for GPUs.'
        ) from error
