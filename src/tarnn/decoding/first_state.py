"""A model whose texts begin from a state in a file, such as `tarnn tune-state` writes, in the place of nothing."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tarnn.data.tensor_file import fingerprint_of
from tarnn.decoding.contents import Contents
from tarnn.decoding.opened import Opened
from tarnn.decoding.state_file import load_state
from tarnn.errors import UserError
from tarnn.models.state import ModelState


@dataclass(frozen=True, eq=False)
class Begun:
    """Contents of a model with the first state of its texts, which belongs to what it computes."""

    contents: Contents
    tensors: dict[str, torch.Tensor]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.contents, name)

    def fingerprint(self) -> str:
        return fingerprint_of(self.tensors, {"model": self.contents.fingerprint()})


def beginning_from(opened: Opened, path: str | Path) -> Opened:
    """Return the model with texts that begin from the state in a file. Its states are no longer those of the model alone.

    Raises UserError for a state of another model, and for one that has read tokens: a text goes on from that.
    """
    state = load_state(path, opened).state
    if bool(state.position.any()):
        raise UserError(
            f"{path} holds a state after {int(state.position.max()):,} tokens; expected one before the first, as `tarnn "
            "tune-state` writes it. `tarnn generate --state-in` goes on from this one."
        )
    contents: Any = Begun(opened.contents, state.tensors())
    about = (*opened.about, f"from the state {path}")
    return replace(opened, contents=contents, new_state=partial(new_state, opened, state), about=about)


def new_state(
    opened: Opened, first: ModelState, rows: int, capacity: int = 0, *args: Any, **options: Any
) -> ModelState:
    """Make the state before the first token, with the numbers of `first` in each row."""
    state = opened.new_state(rows, capacity, *args, **options)
    same = torch.zeros(rows, dtype=torch.int64)
    layers = (x if x.grows else y.select(same) for x, y in zip(state.layers, first.layers, strict=True))
    return replace(state, layers=tuple(layers))
