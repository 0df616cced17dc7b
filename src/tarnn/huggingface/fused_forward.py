"""`forward` of one token by the fused step: what transformers' `generate` calls, token after token."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache

from tarnn.attention.rotary import positions_in
from tarnn.decoding import fastest_step
from tarnn.decoding.loop import Step
from tarnn.decoding.plan import Refusal
from tarnn.decoding.state_check import UnfitState
from tarnn.huggingface.cache import StateLayer
from tarnn.kernels.cpu.model_step import FORMATS
from tarnn.models.backbone import TextModel
from tarnn.models.inputs import can_look
from tarnn.models.state import ModelState

# by default `generate` first runs WARMUP_TOKENS by `forward`, one more per BYTES_PER_TOKEN: packing takes as long
WARMUP_TOKENS, BYTES_PER_TOKEN = 8, 2**23
MOST_BYTES = 2**29  # larger weights are not packed by default: meanwhile memory holds them up to four times
MOST_PLACES = 2**12  # in a table that is made for one text
IGNORED = ("return_dict", "token_type_ids", "tokenizer")  # arguments that change nothing
INTEGERS = (torch.int64, torch.int32)


class FusedForward:
    """The fused step of a model, for tokens that come one by one on top of a transformers cache.

    weights: as `FusedStep` takes them; None: it is never used. warmup_tokens: how many tokens come before it is made. It
    is made anew for each cache that comes, so that no text begins with the weights of an earlier one.
    """

    def __init__(self, model: TextModel, weights: str | None, warmup_tokens: int):
        self.model, self.weights, self.warmup_tokens = model, weights, warmup_tokens
        self.ended = False
        self._step: Step | None = None
        self._begun: WeakSet[Cache] = WeakSet()

    def __call__(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        extra_inputs: Mapping[str, Any],
    ) -> Tensor | None:
        """Logits (b, 1, vocab), the cache written; None, and nothing written, where `forward` has to compute it.

        extra_inputs: other arguments of `forward`; what they request, such as hidden states, `forward` returns. Raises
        ValueError for a token that is not in the vocabulary, and beyond the model's last position.
        """
        if self.weights is None or input_ids is None or cache is None:
            return None
        if not self._supports(input_ids, attention_mask, position_ids, cache, extra_inputs):
            return None
        if self.warmup_tokens > 0:
            self.warmup_tokens -= 1
            return None
        if (step := self._step_for(cache)) is None:
            return None
        layers = cast(list[StateLayer], cache.layers)
        if position_ids is None:
            position_ids = positions_in(attention_mask, None, cache.get_seq_length(), 1, input_ids.device)
        position = position_ids.expand(len(input_ids), 1)[:, 0].long().clone()  # which the step counts on
        try:
            logits, after = step(input_ids[:, 0], ModelState(tuple(x.own(1) for x in layers), position), inplace=True)
        except UnfitState:
            return None
        for layer, layer_state in zip(layers, after.layers, strict=True):
            layer.advance(layer_state)
        return logits[:, None]

    def _supports(self, input_ids, attention_mask, position_ids, cache, extra_inputs: Mapping[str, Any]) -> bool:
        """Whether this is one token per row, not padding, on top of a cache of this model, and only logits are requested."""
        config, rows = self.model.config, len(input_ids)
        if not can_look(input_ids) or input_ids.shape[1:] != (1,) or input_ids.dtype not in INTEGERS:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if config.output_hidden_states or config.output_attentions:
            return False
        if any(x is not None and x is not False for name, x in extra_inputs.items() if name not in IGNORED):
            return False
        shapes = ((rows, 1), (1, 1))
        if position_ids is not None and (position_ids.dtype not in INTEGERS or position_ids.shape not in shapes):
            return False
        writable = (isinstance(x, StateLayer) and x.writable for x in cache.layers)
        if len(cache.layers) != len(self.model.model.layers) or not all(writable):
            return False
        if attention_mask is None:
            return True
        whole = (rows, cache.get_seq_length() + 1)
        return attention_mask.shape == whole and bool(attention_mask[:, -1].all())

    def _step_for(self, cache: Cache) -> Step | None:
        """The fused step, made when a cache begins; None where there is none, or no memory for one."""
        if self._step is None or cache not in self._begun:
            self._step = None  # before there are two
            try:
                self._step = fastest_step(self.model, weights=self.weights, most_places=MOST_PLACES).step
            except (Refusal, RuntimeError, MemoryError):
                self.weights = None
            self._begun.add(cache)
        return self._step


# what was entered and not left, the last at the end: of this thread or asyncio task, and of those that it started since
_entered: ContextVar[tuple[FusedForward, ...]] = ContextVar("fused_forward", default=())


@contextmanager
def fused_forward(model: TextModel, weights: str | None = "float32", warmup_tokens: int = 0) -> Iterator[None]:
    """Within: `model.generate`, and `model(ids, past_key_values=cache)` of one token, use the fused step where they can.

        with fused_forward(model, "int8"):
            model.generate(ids, max_new_tokens=100)

    weights: float32 | bfloat16 | int8 | int4, as `FusedStep` takes them; None: `forward` alone. They are packed
    in each `generate`, and for each other cache at its first such token after `warmup_tokens` others; what changes them takes
    effect in the next. It holds where a context variable set here would: in this thread or asyncio task, and in the tasks
    that it starts within. Raises ValueError for another format.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, or None; got {weights!r}.")
    forward = FusedForward(model, weights, warmup_tokens)
    _entered.set((*_entered.get(), forward))
    try:
        yield
    finally:  # not by a token: a generator may be closed in another order, and in another context
        forward.ended, forward.weights = True, None
        _entered.set(tuple(x for x in _entered.get() if not x.ended))


def active(model: nn.Module) -> FusedForward | None:
    """The last that was entered for this model here. None while a compiler looks on."""
    if torch.compiler.is_compiling():
        return None
    return next((x for x in reversed(_entered.get()) if x.model is model and not x.ended), None)


def enable_by_default(model: TextModel) -> AbstractContextManager[None]:
    """What `generate` enters: a fused step of the weights as they are now, in the format that was entered; else in float32,
    where short texts do without."""
    if (entered := active(model)) is not None:
        return fused_forward(model, entered.weights)
    size = sum(x.nbytes for x in model.parameters())
    return fused_forward(model, "float32" if size <= MOST_BYTES else None, WARMUP_TOKENS + size // BYTES_PER_TOKEN)
