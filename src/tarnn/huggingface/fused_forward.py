"""`forward` by the fused step: what transformers' `generate` calls for a prompt, and then token after token."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from typing import Any, cast, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import ModelOutput, can_return_tuple

from tarnn.attention.rotary import positions_in
from tarnn.decoding.from_program import default_format
from tarnn.decoding.kept import forget, is_kept, kept_runtime
from tarnn.decoding.memory import BYTES, available_bytes
from tarnn.decoding.program_step import ProgramStep
from tarnn.decoding.refusal import OldKernels, Refusal
from tarnn.decoding.state_check import UnfitState
from tarnn.huggingface.cache import StateLayer
from tarnn.huggingface.versions import by_role, cache_name
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models.inputs import can_look
from tarnn.models.state import ModelState
from tarnn.ops import State

STORED = "stored"  # weights packed in the type of the model: bfloat16 for a model in bfloat16, else float32
MOST_OF_MEMORY = 4  # by default weights are packed that take at most one part of so many of what is free
SMALLEST_CACHE = 64  # keys for which a softmax layer's cache has room at least
IGNORED = ("return_dict", "token_type_ids", "tokenizer")  # arguments that change nothing
INTEGERS = (torch.int64, torch.int32)


class FusedForward:
    """The fused step of a model, for tokens that come on top of a transformers cache: a prompt, or one by one.

    weights: a format, or `STORED`; None: it is never used. requested: whether to warn where there is none. For each cache that
    comes the weights are compared with those that are kept packed, so that no text begins with the weights of an earlier one.
    """

    def __init__(self, model: Any, weights: str | None, requested: bool):
        self.model, self.weights, self.requested = model, weights, requested
        self.ended = False
        self._step: ProgramStep | None = None
        self._begun: WeakSet[Cache] = WeakSet()

    def __call__(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        extra_inputs: Mapping[str, Any],
        logits_to_keep: int = 0,
    ) -> Tensor | None:
        """Logits (b, t, vocab), the cache written; None, and nothing written, where `forward` has to compute it.

        logits_to_keep: logits of the last n tokens only; 0: of all. extra_inputs: other arguments of `forward`; what they
        request, such as hidden states, `forward` returns. Raises ValueError for a token that is not in the vocabulary, and
        beyond the model's last position.
        """
        if self.weights is None or input_ids is None or cache is None:
            return None
        if not self._supports(input_ids, attention_mask, position_ids, cache, extra_inputs):
            return None
        num_tokens = input_ids.shape[1]
        position = first_positions(position_ids, attention_mask, self.past(cache), input_ids)
        if position is None or (step := self._step_for(cache)) is None:
            return None
        try:
            state = ModelState(self.states(step, cache, *input_ids.shape), position)
            if num_tokens == 1:
                logits, after = step(input_ids[:, 0], state, inplace=True)
                logits = logits[:, None]
            else:
                mask = None if attention_mask is None else attention_mask[:, -num_tokens:]
                logits, after = step.prefill(input_ids, state, mask, inplace=True, every=logits_to_keep != 1)
                logits = logits[:, -logits_to_keep:] if logits.ndim == 3 else logits[:, None]
        except UnfitState:
            return None
        self.keep(cache, after.layers, num_tokens)
        return logits

    # what is different for models of another library: see `foreign_forward`

    def past(self, cache: Cache) -> int:
        """How many tokens it has seen, padding included, as masks count them."""
        return cache.get_seq_length()

    def knows(self, cache: Cache) -> bool:
        """Whether it is a cache of this model, which may be written."""
        parts, model = _parts(cache), self.model.model
        if len(parts) != len(model.layers) * model.states_per_layer or not all(x.writable for x in parts):
            return False
        return len({x.is_initialized for x in parts}) == 1

    def states(self, step: ProgramStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
        """Each layer's state, which may be written, with room for these tokens."""
        layers = _parts(cache)
        if layers[0].is_initialized:
            return tuple(x.writable_state(num_tokens) for x in layers)
        capacity = layers[0].max_cache_len or max(SMALLEST_CACHE, num_tokens)
        return self.model.model.new_states(rows, capacity)

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        """Leave in the cache the states after so many tokens."""
        for layer, state in zip(_parts(cache), states, strict=True):
            if layer.is_initialized:
                layer.count(state, num_tokens)
            else:
                layer.set_first(state, num_tokens)

    def _supports(self, input_ids, attention_mask, position_ids, cache, extra_inputs: Mapping[str, Any]) -> bool:
        """Whether these are tokens on top of a cache of this model, each row's last no padding, and only logits are requested."""
        config = self.model.config
        if not can_look(input_ids) or input_ids.ndim != 2 or not input_ids.numel() or input_ids.dtype not in INTEGERS:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if config.output_hidden_states or config.output_attentions:
            return False
        if any(x is not None and x is not False for name, x in extra_inputs.items() if name not in IGNORED):
            return False
        if not self.knows(cache):
            return False
        if attention_mask is None:
            return True
        whole = (len(input_ids), self.past(cache) + input_ids.shape[1])
        return attention_mask.shape == whole and bool(attention_mask[:, -1].all())

    def _step_for(self, cache: Cache) -> ProgramStep | None:
        """The fused step, of the weights as they are when a cache begins; None where there is none, or no memory for one.

        Warns of that where a step was requested, and of old kernels, which a user can mend.
        """
        if self._step is None or cache not in self._begun:
            self._step = None  # before there are two
            try:
                runtime = kept_runtime(self.model, None if self.weights == STORED else self.weights)
                self._step = ProgramStep(self.model, runtime)
            except (Refusal, RuntimeError, MemoryError) as error:
                self.weights = None
                why = error if isinstance(error, Refusal) else "no memory for packed weights"
                if self.requested or isinstance(why, OldKernels):
                    warnings.warn(f"generate goes on without the fused step, by forward: {why}.", stacklevel=2)
            self._begun.add(cache)
        return self._step


def _parts(cache: Cache) -> list[StateLayer]:
    """A layer for each state; of caches for other models none."""
    return [part for layer in cache.layers for part in getattr(layer, "parts", ())]


def first_positions(
    position_ids: Tensor | None, attention_mask: Tensor | None, past: int, input_ids: Tensor
) -> Tensor | None:
    """Return the position of each row's first token that is no padding, (b,); None unless the later positions are consecutive."""
    b, t = input_ids.shape
    counted = positions_in(attention_mask, None, past, t, input_ids.device).expand(b, t)
    if position_ids is None:
        position_ids = counted
    elif position_ids.dtype not in INTEGERS or position_ids.shape not in ((b, t), (1, t)):
        return None
    position_ids = position_ids.expand(b, t).long()
    if t == 1:
        return position_ids[:, 0].clone()
    real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask[:, -t:].bool()
    first = real.long().argmax(-1, keepdim=True)
    offset = position_ids - counted
    if not (offset == offset.gather(1, first))[real].all():
        return None
    return position_ids.gather(1, first)[:, 0]


def asking(forward: Callable[..., Any], maker: Callable[[Any, str | None, bool], FusedForward]) -> Callable[..., Any]:
    """`forward` of transformers' language models, but it asks the fused step first, where one was entered, made by `maker`."""
    names = [name for name in signature(forward).parameters if name != "self"]
    of_cache = cache_name(forward)
    made = output_of(forward)

    @can_return_tuple
    @wraps(forward)
    def asks(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (fused := active(self)) is not None:
            given = by_role({**dict(zip(names, args)), **kwargs})
            ids, mask, positions = (given.pop(x, None) for x in ("input_ids", "attention_mask", "position_ids"))
            cache, keep, _ = (given.pop("cache", None), given.pop("logits_to_keep", 0), given.pop("use_cache", None))
            logits = None if isinstance(keep, Tensor) else fused(ids, mask, positions, cache, given, keep)
            if logits is not None:
                return made(**{"logits": logits, of_cache: cache})
        return forward(self, *args, **kwargs)

    cast(Any, asks).maker = maker
    return asks


def output_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The class of what it puts out."""
    kinds = get_args(forward.__annotations__.get("return"))
    return next((x for x in kinds if isinstance(x, type) and issubclass(x, ModelOutput)), CausalLMOutputWithPast)


def entering(
    generate: Callable[..., Any], enters: Callable[[Any, Mapping[str, Any]], Mapping[str, Any] | None]
) -> Callable[..., Any]:
    """`generate` of transformers' language models, but it enters the fused step by default.

    enters(model, arguments): what it gets instead of these arguments; None: it stays as it is.
    """

    @wraps(generate)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := enters(self, kwargs)) is None:
            return generate(self, *args, **kwargs)
        with enable_by_default(self):
            return generate(self, *args, **found)

    cast(Any, entered).enters_for = generate
    return entered


def ask_first(
    kind: Any, maker: Callable[[Any, str | None, bool], FusedForward], enters: Callable[[Any, Mapping[str, Any]], Any]
) -> None:
    """Let a class of transformers' language models ask the fused step first, as tarnn's own models do.

    Once for a class, for good: of models that enter nothing nothing changes. Arguments as in `asking` and `entering`.
    """
    if getattr(vars(kind)["forward"], "maker", None) is None:
        kind.forward, kind.generate = asking(kind.forward, maker), entering(kind.generate, enters)


# what was entered and not left, the last at the end: of this thread or asyncio task, and of those that it started since
_entered: ContextVar[tuple[FusedForward, ...]] = ContextVar("fused_forward", default=())


@contextmanager
def fused_forward(model: Any, weights: str | None = STORED, *, requested: bool = True) -> Iterator[None]:
    """Within: `model.generate`, and `model(ids, cache=cache)`, use the fused step where they can.

        with fused_forward(model, "int8"):
            model.generate(ids, max_new_tokens=100)

    weights: float32 | bfloat16 | int8 | int4; "stored": bfloat16 for a model in bfloat16, else float32; None: `forward` alone.
    They are packed once, and kept beside the model while its weights stay as they were, which each `generate`, and each other
    cache, looks at as it begins: what changes them takes effect in the next (`decoding/kept.py` says what is seen). It holds
    where a context variable set here would: in this thread or asyncio task, and in the tasks that it starts within. requested:
    whether to warn where there is no fused step. Raises ValueError for another format.
    """
    if weights is not None and weights not in (*FORMATS, STORED):
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, {STORED}, or None; got {weights!r}.")
    maker = getattr(model.forward, "maker", FusedForward)
    forward = maker(model, weights, requested)
    _entered.set((*_entered.get(), forward))
    try:
        yield
    finally:  # not by a token: a generator may be closed in another order, and in another context
        forward.ended, forward.weights = True, None
        _entered.set(tuple(x for x in _entered.get() if not x.ended))


def active(model: nn.Module) -> FusedForward | None:
    """The last that was entered for this model here; None while a compiler looks on. Training frees what is packed."""
    if torch.compiler.is_compiling():
        return None
    if model.training:
        forget(model)
    return next((x for x in reversed(_entered.get()) if x.model is model and not x.ended), None)


def enable_by_default(model: Any) -> AbstractContextManager[None]:
    """Return the context for `generate`: as the enclosing `fused_forward` says, or the weights as the model stores them, where
    memory has room."""
    if (entered := active(model)) is not None:
        return fused_forward(model, entered.weights, requested=entered.requested)
    return fused_forward(model, STORED if why_too_large(model) is None else None, requested=False)


def why_too_large(model: nn.Module) -> str | None:
    """Return why `generate` does not pack the weights of a model by default, as they take too much of the memory; else None."""
    free = None if is_kept(model) else available_bytes()
    weights = list(model.parameters())
    size = sum(x.numel() for x in weights) * BYTES[default_format(weights[0].dtype)] if weights else 0
    if free is None or size * MOST_OF_MEMORY <= free:
        return None
    return (
        f"its packed weights take {size / 1e9:,.1f} GB, and by default at most a quarter of the {free / 1e9:,.1f} GB that are "
        "free are taken: request it by `with fused_forward(model)`"
    )
