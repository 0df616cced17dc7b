"""Several tokens read in one pass, of which only the first few may stay: what the verification of a draft needs.

    pending = runtime.verify(ids, state, inplace=True)    # logits (b, t, p) after each of t tokens
    state = pending.accept([2])                           # as if these two alone had been read, to the bit

A row accepts as many tokens as it likes, none among them; `state` is not to be used in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.models.state import ModelState
from tarnn.program.state import check_state

MOST_ROWS = 12  # tokens of a row that one pass reads, as csrc/runtime/call.h has it


@dataclass(frozen=True, eq=False)
class Pending:
    """Logits of a pass over t tokens of each row.

    hidden: what the head read, where the kernel tells. keep: writes the first tokens of each row into the state, and returns it.
    """

    logits: Float[Tensor, "b t p"]
    hidden: Float[Tensor, "b t n"] | None
    keep: Callable[[list[int]], ModelState]

    def accept(self, counts: Sequence[int]) -> ModelState:
        """Return the state after the first `counts` tokens of each row. Call it once. Raises ValueError for other numbers."""
        b, t = self.logits.shape[:2]
        if len(counts) != b or not all(0 <= n <= t for n in counts):
            raise ValueError(f"accept takes a number from 0 to {t} for each of {b} rows; got {list(counts)}.")
        return self.keep(list(counts))


def read_again(runtime: Any, ids: Int[Tensor, "b t"], state: ModelState) -> Pending:
    """Read tokens into a copy of a state: what is accepted is that copy, or is read again.

    For states that the kernels can't undo; a copy of all of the state per pass, its keys and values as well.
    """
    check_state(state, runtime.program, len(ids), [ids.shape[1]] * len(ids))
    logits, after = runtime.prefill(ids, state, every=True)

    def keep(counts: list[int]) -> ModelState:
        if all(n == ids.shape[1] for n in counts):
            return after
        if not any(counts):
            return state
        rows = torch.tensor([i for i, n in enumerate(counts) if n])
        mask = torch.arange(max(counts)) < torch.tensor(counts)[rows, None]
        part = state if len(rows) == len(ids) else state.select(rows)
        _, part = runtime.prefill(ids[rows, : max(counts)], part, mask, inplace=True)
        return part if len(rows) == len(ids) else state.insert(rows, part)

    return Pending(logits, None, keep)


def logged(
    runtime: Any,
    ids: Int[Tensor, "b t"],
    state: ModelState,
    tensors: Sequence[Tensor],
    extra: Tensor | None,
    after: Callable[[list[int]], ModelState],
) -> Pending:
    """Read tokens and leave the state as it is: the kernel notes what would enter it, and lets so much in as is accepted.

    tensors, extra: as the kernel takes them. after: returns the state once so many tokens have entered.
    """
    (b, t), kernel, handle = ids.shape, torch.ops.tarnn_cpu, runtime.handle
    flat, starts = ids.reshape(-1), torch.arange(0, b * t + 1, t)
    logits = torch.empty(b, t, runtime.num_outputs)
    hidden = torch.empty(b, t, runtime.program.instructions[-1].inputs[0].size)
    log = torch.empty(b * t, kernel.program_log_width(handle))
    try:
        kernel.program_verify(handle, flat, state.position, starts, tensors, extra, logits, hidden, log)
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error

    def keep(counts: list[int]) -> ModelState:
        kernel.program_accept(handle, flat, state.position, starts, tensors, log, torch.tensor(counts))
        increment_version((state.position, *tensors))
        return after(counts)

    return Pending(logits, hidden, keep)
