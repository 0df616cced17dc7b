"""`forward` of one token by the fused step: what transformers' `generate` asks for, token after token."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache

from tarnn.decoding.fused import FusedStep
from tarnn.huggingface.cache import LinearStateLayer, StateLayer
from tarnn.kernels.cpu.stack import FORMATS
from tarnn.models.backbone import TextModel
from tarnn.models.inputs import can_look
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State

# `generate` packs unasked after so many tokens by the model's own step, and one more for so many bytes: in about that time
PATIENCE, BYTES_A_TOKEN = 8, 2**23
MOST_BYTES = 2**29  # and no more than this; while it packs, memory holds the weights up to four times
MOST_PLACES = 2**12  # in a table that is made for one text
IGNORED = ("return_dict", "token_type_ids", "tokenizer")  # arguments that change nothing
WHOLE = (torch.int64, torch.int32)


class FusedForward:
    """The fused step of a model, for tokens that come one by one on top of a transformers cache.

    weights: as `FusedStep` takes them; None: it is never taken. patience: how many tokens come before it is made. The step
    is made anew for each cache that comes, so that no text begins with the weights of an earlier one.
    """

    def __init__(self, model: TextModel, weights: str | None, patience: int):
        self.model, self.weights, self.patience = model, weights, patience
        self._step: FusedStep | None = None
        self._begun: WeakSet[Cache] = WeakSet()
        self.over = False
        # what the caches held when the last token was written: their parts, as a model's state
        self._last: tuple[list[dict[str, Any]], ModelState] | None = None

    def __call__(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        asked: Mapping[str, Any],
    ) -> Tensor | None:
        """Logits (b, 1, vocab), the cache written; None, and nothing written, where `forward` has to compute it.

        asked: other arguments of `forward`; what they ask for, such as hidden states, is `forward`'s to give.
        """
        if self.weights is None or input_ids is None or cache is None:
            return None
        if not self._serves(input_ids, attention_mask, position_ids, cache, asked):
            return None
        if self.patience > 0:
            self.patience -= 1
            return None
        if (step := self._step) is None or cache not in self._begun:
            self._step = None  # before there are two
            try:
                step = self._step = FusedStep(self.model, self.weights, MOST_PLACES)
            except (ValueError, RuntimeError, MemoryError):  # none for this model, or no memory for one
                self.weights = None
                return None
            self._begun.add(cache)
        layers = cast(list[StateLayer], cache.layers)
        try:
            state = self._state_of(layers, input_ids, attention_mask, position_ids)
            logits, after = step(input_ids[:, 0], state, inplace=True)
        except ValueError:  # `forward` says what is wrong, or computes it
            self._last = None
            return None
        for layer, part in zip(layers, after.layers, strict=True):
            layer.written_in_place(part, 1)
        self._last = [x.parts for x in layers], after
        return logits[:, None]

    def _serves(self, input_ids, attention_mask, position_ids, cache, asked: Mapping[str, Any]) -> bool:
        """Whether this is one token a row, none of them padding, on top of a cache of this model, and no more is asked for."""
        config, rows = self.model.config, len(input_ids)
        if not can_look(input_ids) or input_ids.shape[1:] != (1,) or input_ids.dtype not in WHOLE:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if config.output_hidden_states or config.output_attentions:
            return False
        if any(x is not None and x is not False for name, x in asked.items() if name not in IGNORED):
            return False
        if position_ids is not None and (
            position_ids.dtype not in WHOLE or position_ids.shape not in ((rows, 1), (1, 1))
        ):
            return False
        if len(cache.layers) != len(self.model.model.layers) or not all(map(_may_be_written, cache.layers)):
            return False
        if attention_mask is None:
            return True
        whole = (rows, cache.get_seq_length() + 1)
        return attention_mask.shape == whole and bool(attention_mask[:, -1].all())

    def _state_of(self, layers: list[StateLayer], input_ids, attention_mask, position_ids) -> ModelState:
        """What the caches hold, as a model's state: the last one, where nobody else has written to them, else a new one.

        A state that others made may be somebody's value, so it is copied; a `KVCache` isn't, which `forward` writes to as well.
        """
        model, shape, past = cast(Any, self.model.model), (len(input_ids), 1), layers[0].get_seq_length()
        places = model._positions(position_ids, attention_mask, None, past, shape, input_ids.device)
        parts, state = self._last or ([], None)
        ours = len(parts) == len(layers) and all(map(is_, (x.parts for x in layers), parts))
        if state is None or not ours or len(state.position) != shape[0] or any(map(_is_full, state.layers)):
            held = (cast(State, x.take(1)) for x in layers)
            position = torch.empty(shape[0], dtype=torch.int64, device="cpu")
            state = ModelState(tuple(x if isinstance(x, KVCache) else x.clone() for x in held), position)
        state.position.copy_(places.expand(shape)[:, 0])
        return state


def _may_be_written(layer: Any) -> bool:
    """Whether a cache's layer holds a state whose next one may take its place."""
    recorded = isinstance(layer, LinearStateLayer) and layer.record_past
    return isinstance(layer, StateLayer) and layer.is_initialized and not recorded


def _is_full(state: Any) -> bool:
    return isinstance(state, KVCache) and state.length == state.capacity


# what was entered and not left, the last at the end: of this thread or asyncio task, and of those that it started since
_entered: ContextVar[tuple[FusedForward, ...]] = ContextVar("fused_forward", default=())


@contextmanager
def fused_forward(model: TextModel, weights: str | None = "float32", patience: int = 0) -> Iterator[None]:
    """Within: `model.generate`, and `model(ids, past_key_values=cache)` of one token, take the fused step where they can.

        with fused_forward(model, "int8"):
            model.generate(ids, max_new_tokens=100)

    weights: float32 | bfloat16 | int8 | int4, as `FusedStep` takes them; None: the model's own step alone. They are packed
    in each `generate`, and for each other cache at its first such token after `patience` others; what changes them takes
    effect in the next. It holds where a context variable set here would: in this thread or asyncio task, and in the tasks
    that it starts within. Raises ValueError for another format.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, or None; got {weights!r}.")
    forward = FusedForward(model, weights, patience)
    _entered.set((*_entered.get(), forward))
    try:
        yield
    finally:  # not by a token: a generator may be closed in another order, and in another context
        forward.over, forward.weights = True, None
        _entered.set(tuple(x for x in _entered.get() if not x.over))


def taken(model: nn.Module) -> FusedForward | None:
    """What was entered for this model here, the last of it. None where a compiler looks on."""
    if torch.compiler.is_compiling():
        return None
    return next((x for x in reversed(_entered.get()) if x.model is model and not x.over), None)


def for_one_text(model: TextModel) -> AbstractContextManager[None]:
    """What `generate` enters: a fused step of the weights as they are now, in the format that was entered; else in float32,
    where short texts do without."""
    if (entered := taken(model)) is not None:
        return fused_forward(model, entered.weights)
    size = sum(x.nbytes for x in model.parameters())
    return fused_forward(model, "float32" if size <= MOST_BYTES else None, PATIENCE + size // BYTES_A_TOKEN)
