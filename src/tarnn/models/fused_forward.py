"""`forward` of one token by the fused step: what transformers' `generate` asks for, token after token."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from tarnn.kernels.cpu.stack import FORMATS
from tarnn.models.cache import LinearStateLayer, StateLayer
from tarnn.models.fused import FusedStep, refusal
from tarnn.models.inputs import can_look
from tarnn.models.recurrent import TextModel
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State

PATIENCE = 8  # tokens by the model's own step before its weights are packed, which takes about as long
MOST_BYTES = 2**30  # of weights that `generate` packs unasked: they are there twice while it runs
IGNORED = ("return_dict", "token_type_ids", "tokenizer")  # arguments that change nothing


class FusedForward:
    """The fused step of a model, for tokens that come one by one on top of a transformers cache.

    weights: as `FusedStep` takes them; None: it is never taken. patience: how many tokens come before it is made.
    """

    def __init__(self, model: TextModel, weights: str | None, patience: int):
        self.model, self.weights, self.patience = model, weights, patience
        self._step: FusedStep | None = None
        self._state: ModelState | None = None
        self._parts: list[dict[str, Any]] = []  # of the caches' states, as the last token left them

    def __call__(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None,
        asked: Mapping[str, Any],
    ) -> Tensor | None:  # fmt: skip
        """Logits (b, 1, vocab), the cache written; None, and nothing written, where `forward` has to compute it.

        asked: other arguments of `forward`; what they ask for, such as hidden states, is `forward`'s to give.
        """
        if self.weights is None or not self._serves(input_ids, attention_mask, cache, asked):
            return None
        if self.patience > 0:
            self.patience -= 1
            return None
        assert input_ids is not None
        assert cache is not None
        try:
            if self._step is None:
                self._step = FusedStep(self.model, self.weights)
            layers = cast(list[StateLayer], cache.layers)
            state = self._state_of(layers, input_ids, attention_mask, position_ids)
            logits, self._state = self._step(input_ids[:, 0], state, inplace=True)
        except (
            ValueError
        ):  # no fused step for this model, token or state; `forward` computes it, or says what is wrong
            self.weights = None
            return None
        for layer, after in zip(layers, self._state.layers, strict=True):
            layer.written_in_place(after, 1)
        self._parts = [x.parts for x in layers]
        return logits[:, None]

    def _serves(self, input_ids, attention_mask, cache, asked: Mapping[str, Any]) -> bool:
        """Whether this is one token a row, none of them padding, on top of a cache of this model, and no more is asked for."""
        config = self.model.config
        if input_ids is None or cache is None or input_ids.shape[1:] != (1,) or not can_look(input_ids):
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if config.output_hidden_states or config.output_attentions:
            return False
        if any(x is not None and x is not False for name, x in asked.items() if name not in IGNORED):
            return False
        if len(cache.layers) != len(self.model.model.layers) or not all(map(_plain, cache.layers)):
            return False
        if attention_mask is None:
            return True
        whole = (len(input_ids), cache.get_seq_length() + 1)
        return attention_mask.shape == whole and bool(attention_mask[:, -1].all())

    def _state_of(self, layers: list[StateLayer], input_ids, attention_mask, position_ids) -> ModelState:
        """What the caches hold, as a model's state: the last one, where nobody else has written to them."""
        model, shape, past = cast(Any, self.model.model), (len(input_ids), 1), layers[0].get_seq_length()
        places = model._positions(position_ids, attention_mask, None, past, shape, input_ids.device)
        state = self._state
        ours = state is not None and all(map(is_, (x.parts for x in layers), self._parts))
        if state is None or not ours or any(map(_is_full, state.layers)):
            position = torch.empty(len(input_ids), dtype=torch.int64)
            state = ModelState(tuple(cast(State, x.take(1)) for x in layers), position)
        state.position.copy_(places.expand(shape)[:, 0])
        return state


def _plain(layer: Any) -> bool:
    """Whether a cache's layer holds a state that may be written, and the one before be forgotten."""
    recorded = isinstance(layer, LinearStateLayer) and layer.record_past
    return isinstance(layer, StateLayer) and layer.is_initialized and not recorded


def _is_full(state: Any) -> bool:
    return isinstance(state, KVCache) and state.length == state.capacity


_taken: ContextVar[FusedForward | None] = ContextVar(
    "the fused forward of this thread's generate", default=None
)


@contextmanager
def fused_forward(model: TextModel, weights: str | None = "float32", patience: int = 0) -> Iterator[None]:
    """Within: `model.generate`, and `model(ids, past_key_values=cache)` of one token, take the fused step where they can.

        with fused_forward(model, "int8"):
            model.generate(ids, max_new_tokens=100)

    weights: float32 | bfloat16 | int8 | int4, as `FusedStep` takes them, packed once, at the first such token after
    `patience` others: they should not change within. None: the model's own step alone. Only in the thread that entered it.
    Raises ValueError for another format.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, or None; got {weights!r}.")
    before = _taken.set(FusedForward(model, weights, patience))
    try:
        yield
    finally:
        _taken.reset(before)


def taken(model: nn.Module) -> FusedForward | None:
    """What `fused_forward` has set for this model, here and now."""
    found = _taken.get()
    return found if found is not None and found.model is model else None


def unasked(model: TextModel) -> AbstractContextManager[None]:
    """What `generate` enters: the fused step in float32, where it was not entered before; short texts do without."""
    if taken(model) is not None:
        return nullcontext()
    small = sum(x.nbytes for x in model.parameters()) <= MOST_BYTES
    return fused_forward(model, "float32" if small and refusal(model) is None else None, PATIENCE)
