"""Programs that run where the compiled kernels can't: computed by their definition, right and slow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tarnn.models.state import ModelState
from tarnn.ops.softmax.cache import RowCaches, full
from tarnn.program.definition import run
from tarnn.program.instructions import Program, StateSpec
from tarnn.program.runtime import Checked, Runtime


class PlainRuntime(Runtime):
    """A program in plain PyTorch, in float32, with the interface of `Runtime` and the same states."""

    def __init__(self, program: Program):
        self.program, self.weights = program, "float32"
        self.num_outputs = program.num_outputs
        self.vocab_size = len(program.instructions[0].weights["tokens"])
        self._checked = Checked()

    @property
    def nbytes(self) -> int:
        """The program's own weights are read where they lie."""
        return 0

    @property
    def can_undo(self) -> bool:
        return False

    def _run(
        self,
        ids: Tensor,
        state: ModelState,
        tensors: Sequence[Tensor],
        out: Tensor,
        extra: Tensor | None,
        starts: Tensor | None = None,
        every: bool = False,
        hidden: Tensor | None = None,
    ) -> None:
        """Compute what one call of the kernel does, and write the state in place."""
        counts = [1] * len(ids) if starts is None else starts.diff().tolist()
        positions = state.position.tolist()
        self._check_tokens(ids, state, counts)
        specs = self.program.states
        before = [tuple(_read(state, x, row, position) for x in specs) for row, position in enumerate(positions)]
        added = None if extra is None else extra.split(counts)
        logits, after = run(self.program, ids.split(counts), before, positions=positions, extra=added)
        for row, values in enumerate(after):
            for spec, x in zip(specs, values, strict=True):
                _write(state, spec, row, positions[row], counts[row], x)
        state.position.add_(torch.tensor(counts))
        if every:
            out.copy_(torch.cat(list(logits)))
        else:
            for row, x in enumerate(logits):  # a row without a token keeps what its last one gave
                out[row] = x[-1] if len(x) else out[row]

    def _check_tokens(self, ids: Tensor, state: ModelState, counts: list[int]) -> None:
        """Raise ValueError for other tokens than the vocabulary's, and where a row has no place for its own."""
        if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < self.vocab_size):
            wrong = next(x for x in ids.tolist() if not 0 <= x < self.vocab_size)
            raise ValueError(f"a token must be from 0 to {self.vocab_size - 1}; got {wrong}.")
        self._check_length(state.position + torch.tensor(counts))
        for layer in state.layers:
            for cache, seen, more in zip(getattr(layer, "rows", ()), state.position.tolist(), counts):
                if seen + more > cache.capacity:
                    raise full(cache.capacity, seen, more)


def _place(state: ModelState, spec: StateSpec, row: int) -> Tensor:
    """Return the memory of one row's tensor."""
    layer = state.layers[spec.layer]
    x: Tensor = (
        getattr(layer.rows[row], spec.name)[0] if isinstance(layer, RowCaches) else getattr(layer, spec.name)[row]
    )
    return x


def _read(state: ModelState, spec: StateSpec, row: int, length: int) -> Tensor:
    x = _place(state, spec, row)
    x = x if spec.grows is None else x.narrow(spec.grows, 0, length)
    return x.float() if x.is_floating_point() else x


def _write(state: ModelState, spec: StateSpec, row: int, length: int, count: int, x: Tensor) -> None:
    place = _place(state, spec, row)
    if spec.grows is None:
        place.copy_(x)
    else:
        place.narrow(spec.grows, length, count).copy_(x.narrow(spec.grows, length, count))
