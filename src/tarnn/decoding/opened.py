"""A model that runs, whatever kind it is: a step, new states, and the facts that whoever runs it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from tarnn.decoding.contents import Contents
from tarnn.decoding.loop import Step
from tarnn.families.composites import check_text
from tarnn.models.state import ModelState


class Limits(NamedTuple):
    """The numbers that tokens are checked against. max_position_embeddings: positions of a sequence; None: any number."""

    vocab_size: int
    max_position_embeddings: int | None


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that runs.

    step: called with one token per row, as `Runtime` is. prefill: with tokens (b, t). new_state(rows, capacity, cache_dtype):
    the state before the first token. weights: the format in which the step keeps them; None: a step in plain PyTorch.
    architecture, fields: the class and config of the model. dtype: of the weights that were opened. end_ids: tokens that end a
    text. sampling: how its makers draw from it, arguments of `generate`. key_bytes: of the keys and values of one token, if
    every layer of attention had softmax. about: lines on what was chosen, and why nothing faster. make_head: opens what it was
    trained to expect the token after next with.
    """

    contents: Contents
    step: Step
    prefill: Step
    new_state: Callable[..., ModelState]
    config: Limits
    architecture: str
    fields: Mapping[str, Any]
    weights: str | None
    dtype: torch.dtype
    key_bytes: int
    end_ids: frozenset[int] = frozenset()
    pad_id: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    make_head: Callable[[], Any] = lambda: None

    @property
    def device(self) -> torch.device:
        return self.contents.device

    @property
    def num_parameters(self) -> int:
        return self.contents.num_parameters

    @property
    def num_bytes(self) -> int:
        """The bytes of weights and tables, as they were opened."""
        return self.contents.num_bytes

    def check_text(self, ids: Any) -> None:
        """Raise UserError for tokens (tensor or array) that stand for images or sounds, which the text model can't read."""
        check_text(ids, self.fields)

    @cached_property
    def draft_head(self) -> Any:
        """The runtime of a head that makes drafts; None where the folder has none. Raises UserError for one that does not fit."""
        return self.make_head()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the weights and of what the config says about the function."""
        return self.contents.fingerprint()
