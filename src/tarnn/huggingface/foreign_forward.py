"""`forward` and `generate` of transformers' models by the fused step, on transformers' own cache."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from tarnn.decoding.program_step import ProgramStep
from tarnn.huggingface.foreign_cache import ForeignLayers, tensors_of
from tarnn.huggingface.fused_forward import FusedForward, asking, entering
from tarnn.kernels.cpu.products import WEIGHT_TYPES
from tarnn.ops import State


class ForeignForward(FusedForward):
    """The fused step of a model of transformers, on top of transformers' own cache.

    caches: classes of caches that it writes. What is different for layers of another kind, `conversion.fused` overrides.
    """

    caches: tuple[type, ...] = (DynamicCache,)

    def __init__(self, model: Any, weights: str | None, requested: bool):
        super().__init__(model, weights, requested)
        self._layers = ForeignLayers()
        self._mask: Tensor | None = None

    def __call__(self, input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep=0) -> Tensor | None:
        if cache is None or input_ids is None or not isinstance(attention_mask, Tensor | None):
            return None  # without a cache, or with one whose masks are made before
        if attention_mask is not None and is_linear(cache):
            attention_mask = attention_mask[:, -input_ids.shape[1] :]  # of what it holds nobody asks any more
        masked = attention_mask is not None and not bool(attention_mask.all())
        if masked and not self._is_left_padded(cache, attention_mask, input_ids):
            return None  # `forward` refuses it, or keeps keys in another order
        self._mask = attention_mask.bool() if masked and not is_linear(cache) else None
        return super().__call__(input_ids, attention_mask, position_ids, cache, extra_inputs, logits_to_keep)

    def knows(self, cache: Cache) -> bool:
        if type(cache) not in self.caches or cast(Any, cache).offloading:
            return False
        return all(map(self.takes, cache.layers)) and len(set(map(self.begun, cache.layers))) == 1

    def takes(self, layer: Any) -> bool:
        """Whether it is a layer of a cache that may be written."""
        if type(layer) not in (DynamicLayer, LinearAttentionLayer) or getattr(layer, "record_past", False):
            return False
        return all(x.dtype in WEIGHT_TYPES and x.is_cpu for x in tensors_of(layer))

    def begun(self, layer: Any) -> bool:
        """Whether it has seen a token."""
        return bool(tensors_of(layer))

    def past(self, cache: Cache) -> int:
        return 0 if is_linear(cache) else super().past(cache)

    def states(self, step: ProgramStep, cache: Cache, rows: int, num_tokens: int) -> tuple[State, ...]:
        mask = None if self._mask is None else self._mask[:, : self.past(cache)]
        new, states = iter(step.new_row), list[State]()
        for i, layer in enumerate(cache.layers):
            likes = list(islice(new, self.num_states(i)))
            states += self.layer_states(layer, likes, rows, num_tokens, mask)
        return tuple(states)

    def num_states(self, number: int) -> int:
        """How many states the layer of this number has."""
        return 1

    def layer_states(
        self, layer: Any, likes: Sequence[State], rows: int, num_tokens: int, mask: Tensor | None
    ) -> Sequence[State]:
        """The states of a layer of a cache, which may be written, as `states` returns all. likes: of one row each."""
        return [self._layers.state(layer, like, rows, num_tokens, mask, self.model.dtype) for like in likes]

    def keep(self, cache: Cache, states: Sequence[State], num_tokens: int) -> None:
        rest = iter(states)
        for i, layer in enumerate(cast(Any, cache.layers)):
            self.keep_layer(layer, list(islice(rest, self.num_states(i))), num_tokens)

    def keep_layer(self, layer: Any, states: Sequence[State], num_tokens: int) -> None:
        """Leave in a layer of a cache the states after so many tokens."""
        self._layers.give(layer, states[0], self._mask, self.model.dtype)

    def _is_left_padded(self, cache: Any, mask: Tensor, ids: Tensor) -> bool:
        """Whether all padding comes before a row's first token: none among tokens that go on with a cache."""
        gaps = self.begun(cache.layers[0]) and not bool(mask[:, -ids.shape[1] :].all())
        return not gaps and bool((mask.long().diff(dim=1) >= 0).all())


def is_linear(cache: Any) -> bool:
    """Whether it has no keys and values, and so counts no tokens."""
    return all(type(x) is LinearAttentionLayer for x in cache.layers)


class Special(NamedTuple):
    """Models with another adapter than `ForeignForward`. arguments: what `generate` gets instead of its own."""

    applies: Callable[[Any], Any]
    adapter: type[ForeignForward]
    arguments: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


special: list[Special] = []


def adapter_of(model: Any, weights: str | None, requested: bool) -> ForeignForward:
    """Make the adapter of a model of transformers; arguments as `FusedForward` takes them."""
    kind = next((x.adapter for x in special if x.applies(model)), ForeignForward)
    return kind(model, weights, requested)


def arguments_of(model: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of `generate` by the fused step."""
    return next((x.arguments(model, given) for x in special if x.applies(model)), given)


def foreign_head(forward: Any) -> Any:
    """`forward` of a model that asks the fused step first, once."""
    return forward if hasattr(forward, "maker") else asking(forward, adapter_of)


def foreign_generate(generate: Any) -> Any:
    """`generate` that enters the fused step, once."""
    return entering(getattr(generate, "enters_for", generate), arguments_of)
