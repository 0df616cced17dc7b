"""The processes that share sequences, and whether ops take their inputs as stretches of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
import torch.distributed as dist

from tarnn.errors import UserError


class Ranks:
    """The processes that share a sequence, and the place of this one among them.

    process_group, rank, size: as torch.distributed has them. bytes_sent: what this process has sent to the others so far,
    backward passes included; without what the transport adds. is_turned: they are counted from the last to the first.
    """

    def __init__(self, group: Any = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise UserError(
                "a sequence over several processes needs torch.distributed; got a process that has not joined. Start it with "
                "torchrun, and call torch.distributed.init_process_group() first."
            )
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise UserError(
                    f"one dimension of a device mesh shares sequences; got {group.ndim}, {group.mesh_dim_names}. Pass "
                    "mesh[name]."
                )
            group = group.get_group()
        self.process_group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        if self.rank < 0:
            raise UserError(
                f"only ranks of a group can share its sequences; rank {dist.get_rank()} is not one. Pass its own group."
            )
        self.is_turned, self._sent = False, [0]

    @property
    def bytes_sent(self) -> int:
        return self._sent[0]

    def count(self, num_bytes: int) -> None:
        """Add to `bytes_sent`."""
        self._sent[0] += num_bytes

    def turned(self) -> "Ranks":
        """The same ranks, of which the last is the first: for sweeps from the end of a sequence to its beginning."""
        other = copy(self)
        other.rank, other.is_turned = self.size - 1 - self.rank, not self.is_turned
        return other


# of the process, not of the thread: activation checkpointing computes again what autograd's own threads need
_active: Ranks | None = None


def active() -> Ranks | None:
    """The ranks that share the sequences of calls made now; None if each process has whole ones."""
    return _active


@contextmanager
def sequence(group: Any = None) -> Iterator[Ranks]:
    """Within this context, ops take and return this rank's stretch of every sequence.

        with tarnn.parallel.sequence(group):
            loss = loss_of(model(stretch))       # stretch (b, t of this rank, …)
            loss.backward()

    Stretches follow one another in the order of ranks, and may differ in length. All ranks make the same calls with the same
    weights, forward and backward. Tensors with a time axis are stretches: q, k, v, key_mask, log_decay, key_log_weight, and
    outputs. All else is of the whole sequence, the same on every rank: `cu_seqlens` bounds whole packed sequences, `state` is
    what came before the first rank's stretch, and a returned state is that behind the last rank's. A gradient is that of the
    sum of the ranks' losses, with regard to what this rank was given: those of weights have to be summed over ranks, as
    DistributedDataParallel does.

    What torch.compile has compiled runs as if it were not: graphs don't hold what ranks exchange.

    group: a process group of torch.distributed, or one dimension of a device mesh (FSDP2's, accelerate's); None: all processes.
    """
    global _active
    ranks, before = Ranks(group), _active
    _active = ranks if ranks.size > 1 else None
    try:
        with nullcontext() if _active is None else torch.compiler.set_stance("force_eager"):
            yield ranks
    finally:
        _active = before


@contextmanager
def among(ranks: Ranks | None) -> Iterator[None]:
    """Within this context, ops take stretches of sequences that these ranks share; with None whole sequences."""
    global _active
    before, _active = _active, ranks
    try:
        yield
    finally:
        _active = before


def alone() -> AbstractContextManager[None]:
    """Within this context, ops take whole sequences again: for ops that are made of others."""
    return among(None)


def refuse(what: str, remedy: str) -> None:
    """Raise NotImplementedError within `sequence`, where `what` would see one stretch alone."""
    if _active is not None:
        raise NotImplementedError(f"{what} has no form for sequences over several ranks. {remedy}")
