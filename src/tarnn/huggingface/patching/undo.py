"""Undo: a layer's recurrent states go back over its last tokens, when assisted generation crops the cache.

transformers crops keys, values and the inputs of convolutions, and refuses assisted generation for models with more than that.
While a cache records (`activate_past_recording`), the recurrences of a layer note here what they read and the state before it.
"""

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from tarnn.huggingface.past import KEPT, Again, Inputs, Past, Run, check_crop, crop_as_one, read_and_note
from tarnn.huggingface.versions import cache_in
from tarnn.ops.state import State


class UndoingLayer:
    """What a layer of transformers' cache becomes: its `crop` takes recurrent states along.

    pasts: of each recurrence of the layer, in the order of their calls, and how the cache holds its state. num_tokens: how
    many it has read, None where that is unknown.
    """

    __slots__ = ()  # or no layer that exists could become one
    pasts: list[tuple[Past, Callable[[Any], Tensor]]]
    next_past: int
    num_tokens: int | None

    def note(self: Any, tensor: Callable[[Any], Tensor], state: Any, num_tokens: int, again: Again) -> None:
        """Take note of what the next recurrence of this call reads. tensor(state): as the cache holds it."""
        if self.next_past == len(self.pasts):
            self.pasts.append((Past(), tensor))
        copied = lambda: None if state is None else state.map(lambda x: x.detach().clone())  # noqa: E731
        self.pasts[self.next_past][0].add(copied, num_tokens, again)
        self.next_past += 1

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens a crop would remove. Raises ValueError for more than were recorded."""
        recorded = min((past.num_tokens for past, _ in self.pasts), default=0)
        return check_crop(tokens_to_remove, min(recorded, KEPT))

    def rewind(self: Any, num_tokens: int) -> None:
        """Put back the recurrent state before the last tokens."""
        held = self.recurrent_states[0]
        states = [(past.rewind(num_tokens), tensor) for past, tensor in self.pasts]
        if states[0][0] is None:
            held.zero_()
        else:  # of several recurrences one state, of heads
            held.copy_(torch.stack([tensor(x) for x, tensor in states], 1).reshape(held.shape))

    def lengthen(self: Any, conv_state: Tensor, token: Tensor) -> None:
        """Append a token to the inputs of a convolution that are held, in the place of moving them on."""
        for i, held in self.conv_states.items():
            if held is conv_state:
                self.conv_states[i] = torch.cat([held, token.to(held.dtype)], dim=2)
                self.shorten(i)

    def shorten(self: Any, i: int) -> None:
        """Let go of inputs of a convolution that no crop can ask for."""
        most = self.conv_kernel_size[i] + KEPT
        if self.conv_states[i].shape[-1] > 2 * most:
            self.conv_states[i] = self.conv_states[i][..., -most:].clone()


@functools.cache
def _undoing_layer(kind: Any) -> type:
    def crop(self: Any, tokens_to_remove: int) -> None:
        remove, inputs = self.check_crop(tokens_to_remove), dict(self.conv_states)
        kind.crop(self, tokens_to_remove)
        if remove:
            self.rewind(remove)
            self.num_tokens = None if self.num_tokens is None else self.num_tokens - remove
        self.conv_states = {i: x[..., : x.shape[-1] - remove] for i, x in inputs.items()}  # kept for the next crop

    def update_conv_state(self: Any, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        inputs = kind.update_conv_state(self, conv_states, state_idx, **kwargs)
        self.shorten(state_idx)
        return inputs

    def reset(self: Any) -> None:
        kind.reset(self)
        self.pasts, self.num_tokens = [], 0

    def reorder_cache(self: Any, beam_idx: Tensor) -> None:
        kind.reorder_cache(self, beam_idx)
        self.pasts.clear()  # which have other rows

    methods = {x.__name__: x for x in (crop, update_conv_state, reset, reorder_cache)}
    return type(f"Undoing{kind.__name__}", (kind, UndoingLayer), methods)


_LAYER: ContextVar[UndoingLayer | None] = ContextVar("layer", default=None)  # of the cache, whose states are read


def recording() -> UndoingLayer | None:
    """The cache's layer for the layer that runs, if it records."""
    return None if torch.compiler.is_compiling() else _LAYER.get()


def layer_with_undo(original: Callable) -> Callable:
    """The forward of a layer `(hidden_states, cache, …)` whose recurrences use `remembered`."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = args[0] if args else cache_in(kwargs)
        if cache is None or torch.compiler.is_compiling() or hidden_states.device.type != "cpu":
            return original(self, hidden_states, *args, **kwargs)
        layer = cache.layers[self.layer_idx]
        if not isinstance(layer, UndoingLayer):
            begins = not any(layer.has_previous_state.values())
            layer.__class__ = _undoing_layer(cast(Any, type(layer)))
            layer.pasts, layer.num_tokens = [], 0 if begins else None
        if layer.num_tokens is not None:
            layer.num_tokens += hidden_states.shape[1]
        if not layer.record_past:
            return original(self, hidden_states, *args, **kwargs)
        crop_as_one(cache)
        layer.next_past = 0
        token = _LAYER.set(layer)
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            _LAYER.reset(token)

    return forward


def remembered(run: Run, inputs: Inputs, state: State | None, tensor: Callable[[Any], Tensor], time: int = 2) -> Any:
    """run(inputs, state), noted where the cache records. tensor(state): as the cache holds it."""
    layer = recording()
    if layer is None:
        return run(inputs, state)
    return read_and_note(run, inputs, state, functools.partial(layer.note, tensor), time)


_STATEFUL = "_is_stateful"  # why transformers refuses assisted generation
_ELSEWHERE = ("RecurrentGemma", "xLSTM")  # which keep states where no crop of transformers' cache reaches them


class _OffCpu:
    """Of one model what the property below is of all: true where its states can't go back, since transformers computes them."""

    def __init__(self, model: Any):
        self.model = ref(model)

    def __bool__(self) -> bool:
        return (model := self.model()) is None or model.device.type != "cpu"


def lifted_refusals(owners: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """What lets those of these classes or models that transformers takes for stateful generate with assistance: on a CPU."""
    changes: list[tuple[Any, str, Any]] = []
    for owner in owners:
        if isinstance(owner, type):
            if _STATEFUL in vars(owner) and not owner.__name__.startswith(_ELSEWHERE):
                changes.append((owner, _STATEFUL, property(lambda self: self.device.type != "cpu")))
        elif getattr(owner, _STATEFUL, False) and not type(owner).__name__.startswith(_ELSEWHERE):
            changes.append((owner, _STATEFUL, _OffCpu(owner)))
    return changes
