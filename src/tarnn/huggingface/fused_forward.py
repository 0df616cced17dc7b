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
from tarnn.decoding.fused import FusedStep
from tarnn.decoding.refusal import OldKernels, Refusal
from tarnn.decoding.state_check import UnfitState
from tarnn.huggingface.cache import StateLayer
from tarnn.huggingface.versions import by_role, cache_name
from tarnn.kernels.cpu.products import FORMATS
from tarnn.models.inputs import can_look
from tarnn.models.state import ModelState
from tarnn.ops import State

# by default `generate` first runs WARMUP_TOKENS by `forward`, one more per BYTES_PER_TOKEN: packing takes as long
WARMUP_TOKENS, BYTES_PER_TOKEN = 8, 2**23
MOST_BYTES = 2**29  # larger weights are not packed by default: meanwhile memory holds them up to four times
PROMPT_TOKENS = 64  # tokens of a prompt that take `forward` as long as one token alone does
SMALLEST_CACHE = 64  # keys for which a softmax layer's cache has room at least
IGNORED = ("return_dict", "token_type_ids", "tokenizer")  # arguments that change nothing
INTEGERS = (torch.int64, torch.int32)


class FusedForward:
    """The fused step of a model, for tokens that come on top of a transformers cache: a prompt, or one by one.

    weights: as `FusedStep` takes them; None: it is never used. warmup_tokens: how many tokens come before it is made. It
    is made anew for each cache that comes, so that no text begins with the weights of an earlier one.
    """

    def __init__(self, model: Any, weights: str | None, warmup_tokens: int):
        self.model, self.weights, self.warmup_tokens = model, weights, warmup_tokens
        self.requested, self.ended = warmup_tokens == 0, False
        self._step: FusedStep | None = None
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
        if self.warmup_tokens > num_tokens // PROMPT_TOKENS:
            self.warmup_tokens -= num_tokens == 1
            return None
        position = first_positions(position_ids, attention_mask, self.past(cache), input_ids)
        if position is None or (step := self._step_for(cache)) is None:
            return None
        self.warmup_tokens = 0
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

    def states(self, step: FusedStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
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

    def _step_for(self, cache: Cache) -> FusedStep | None:
        """The fused step, made when a cache begins; None where there is none, or no memory for one.

        Warns of that where a step was requested, and of old kernels, which a user can mend.
        """
        if self._step is None or cache not in self._begun:
            self._step = None  # before there are two
            try:
                if (reason := why_in_float32(self.model)) is not None:
                    raise Refusal(reason)
                self._step = FusedStep(cast(nn.Module, self.model), cast(str, self.weights))
            except (Refusal, RuntimeError, MemoryError) as error:
                self.weights = None
                why = error.__cause__ or error if isinstance(error, Refusal) else "no memory for packed weights"
                if self.requested or isinstance(why, OldKernels):
                    warnings.warn(f"generate goes on without the fused step, by forward: {why}.", stacklevel=2)
            self._begun.add(cache)
        return self._step


def why_in_float32(model: nn.Module) -> str | None:
    """Why `generate` leaves a model in 16 bits to `forward`; None for one in float32."""
    other = next((x.dtype for x in model.parameters() if x.dtype != torch.float32), None)
    if other is None:
        return None
    return (
        f"its weights are {other}, a type that generate's caches have too, and the fused step keeps states in float32: "
        "FusedStep(model) takes it, and generate of model.float()"
    )


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


def asking(forward: Callable[..., Any], maker: Callable[[Any, str | None, int], FusedForward]) -> Callable[..., Any]:
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
    kind: Any, maker: Callable[[Any, str | None, int], FusedForward], enters: Callable[[Any, Mapping[str, Any]], Any]
) -> None:
    """Let a class of transformers' language models ask the fused step first, as tarnn's own models do.

    Once for a class, for good: of models that enter nothing nothing changes. Arguments as in `asking` and `entering`.
    """
    if getattr(vars(kind)["forward"], "maker", None) is None:
        kind.forward, kind.generate = asking(kind.forward, maker), entering(kind.generate, enters)


# what was entered and not left, the last at the end: of this thread or asyncio task, and of those that it started since
_entered: ContextVar[tuple[FusedForward, ...]] = ContextVar("fused_forward", default=())


@contextmanager
def fused_forward(model: Any, weights: str | None = "float32", warmup_tokens: int = 0) -> Iterator[None]:
    """Within: `model.generate`, and `model(ids, cache=cache)`, use the fused step where they can.

        with fused_forward(model, "int8"):
            model.generate(ids, max_new_tokens=100)

    weights: float32 | bfloat16 | int8 | int4, as `FusedStep` takes them; None: `forward` alone. They are packed
    in each `generate`, and for each other cache at its first prompt of 64 · `warmup_tokens` tokens, or its first single
    token after so many others; what changes them takes effect in the next. It holds where a context variable set here
    would: in this thread or asyncio task, and in the tasks that it starts within. Raises ValueError for another format.
    """
    if weights is not None and weights not in FORMATS:
        raise ValueError(f"weights must be one of {', '.join(FORMATS)}, or None; got {weights!r}.")
    maker = getattr(model.forward, "maker", FusedForward)
    forward = maker(model, weights, warmup_tokens)
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


def enable_by_default(model: Any) -> AbstractContextManager[None]:
    """Return the context for `generate`: use the weight format of the enclosing `fused_forward`, or float32, which is packed
    only after the warm-up tokens."""
    if (entered := active(model)) is not None:
        return fused_forward(model, entered.weights)
    size = sum(x.nbytes for x in model.parameters())
    return fused_forward(model, "float32" if size <= MOST_BYTES else None, WARMUP_TOKENS + size // BYTES_PER_TOKEN)
