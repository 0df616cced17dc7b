"""Undo: a layer's recurrent states go back over its last tokens, when assisted generation crops the cache.

transformers crops keys, values and the inputs of convolutions, and refuses assisted generation for models with more than that.
While a cache records (`activate_past_recording`), the recurrences of a layer note here what they read and the state before it.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tarnn.huggingface.rewind import KEPT, Inputs, Replay, Rewindable, Run, check_crop, crop_as_one, read_and_note
from tarnn.huggingface.versions import cache_in
from tarnn.ops.state import State


class Undo:
    """The attribute `tarnn_undo` of a layer of transformers' cache: what it takes to rewind its states.

    The layer keeps its type; its `crop` and `reorder_cache` are those below. pasts: of each recurrence of the layer, in the
    order of their calls, and how the cache holds its state. num_tokens: how many it has read, None where that is unknown.
    """

    def __init__(self, num_tokens: int | None) -> None:
        self.pasts: list[tuple[Rewindable, Callable[[Any], Tensor]]] = []
        self.next_past = 0
        self.num_tokens = num_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> "Undo":
        made = Undo(self.num_tokens)
        made.pasts = copy.deepcopy(self.pasts, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        # no file holds the functions that read again
        return {"pasts": [], "next_past": 0, "num_tokens": self.num_tokens}

    def note(self, tensor: Callable[[Any], Tensor], state: Any, num_tokens: int, replay: Replay) -> None:
        """Take note of what the next recurrence of this call reads. tensor(state): as the cache holds it."""
        if self.next_past == len(self.pasts):
            self.pasts.append((Rewindable(), tensor))
        copied = lambda: None if state is None else state.map(lambda x: x.detach().clone())  # noqa: E731
        self.pasts[self.next_past][0].add(copied, num_tokens, replay)
        self.next_past += 1

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens a crop would remove. Raises ValueError for more than were recorded."""
        recorded = min((past.num_tokens for past, _ in self.pasts), default=0)
        return check_crop(tokens_to_remove, min(recorded, KEPT))

    def rewind(self, layer: Any, num_tokens: int) -> None:
        """Put back the layer's recurrent state before the last tokens."""
        if num_tokens:
            held = layer.recurrent_states[0]
            states = [(past.rewind(num_tokens), tensor) for past, tensor in self.pasts]
            if states[0][0] is None:
                held.zero_()
            else:  # of several recurrences one state, of heads
                held.copy_(torch.stack([tensor(x) for x, tensor in states], 1).reshape(held.shape))
            self.num_tokens = None if self.num_tokens is None else self.num_tokens - num_tokens


def crop(layer: Any, tokens_to_remove: int) -> None:
    """transformers' own, which takes the recurrent state along."""
    remove, inputs = layer.tarnn_undo.check_crop(tokens_to_remove), dict(layer.conv_states)
    type(layer).crop(layer, tokens_to_remove)
    layer.tarnn_undo.rewind(layer, remove)
    layer.conv_states = {i: x[..., : x.shape[-1] - remove] for i, x in inputs.items()}  # kept for the next crop


def reorder_cache(layer: Any, beam_idx: Tensor) -> None:
    """transformers' own; what was noted is of other rows."""
    type(layer).reorder_cache(layer, beam_idx)
    layer.tarnn_undo.pasts.clear()


def _with_undo(layer: Any, num_tokens: int | None) -> None:
    """Let a layer of a cache go back; it has read so many tokens."""
    layer.tarnn_undo = Undo(num_tokens)
    layer.crop, layer.reorder_cache = types.MethodType(crop, layer), types.MethodType(reorder_cache, layer)


def lengthen(layer: Any, conv_state: Tensor, token: Tensor) -> None:
    """Append a token to the inputs of a convolution that a layer holds, in the place of moving them on."""
    for i, held in layer.conv_states.items():
        if held is conv_state:
            layer.conv_states[i] = torch.cat([held, token.to(held.dtype)], dim=2)


def _shorten(layer: Any) -> None:
    """Let go of inputs of convolutions that no crop can ask for."""
    for i, x in layer.conv_states.items():
        most = (layer.conv_kernel_size[i] or 0) + KEPT
        if x is not None and x.shape[-1] > 2 * most:
            layer.conv_states[i] = x[..., -most:].clone()


_LAYER: ContextVar[Any] = ContextVar("layer", default=None)  # of the cache, whose states are read


def recording() -> Any:
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
        begins = not any(layer.has_previous_state.values())
        known = hasattr(layer, "tarnn_undo") and layer.crop.__func__ is crop  # from a file it has transformers' own
        if begins or not known:
            _with_undo(layer, 0 if begins else None)
        undo = layer.tarnn_undo
        if undo.num_tokens is not None:
            undo.num_tokens += hidden_states.shape[1]
        if not layer.record_past:
            return original(self, hidden_states, *args, **kwargs)
        crop_as_one(cache)
        undo.next_past = 0
        token = _LAYER.set(layer)
        try:
            return original(self, hidden_states, *args, **kwargs)
        finally:
            _LAYER.reset(token)
            _shorten(layer)

    return forward


def remembered(run: Run, inputs: Inputs, state: State | None, tensor: Callable[[Any], Tensor], time: int = 2) -> Any:
    """run(inputs, state), noted where the cache records. tensor(state): as the cache holds it."""
    layer = recording()
    if layer is None:
        return run(inputs, state)
    return read_and_note(run, inputs, state, functools.partial(layer.tarnn_undo.note, tensor), time)


_STATEFUL = "_is_stateful"  # why transformers refuses assisted generation
_ELSEWHERE = ("RecurrentGemma", "xLSTM")  # which keep states where no crop of transformers' cache reaches them


class _OffCpu:
    """Per-model version of `is_stateful`: True if its states cannot be rewound because transformers computes them."""

    def __init__(self, model: Any):
        self.model = ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_OffCpu":
        return self

    def __reduce__(self) -> tuple:
        return bool, (True,)  # in a file nobody knows

    def __bool__(self) -> bool:
        return (model := self.model()) is None or model.device.type != "cpu"


def lifted_refusals(owners: Iterable[Any]) -> list[tuple[Any, str, Any]]:
    """Allow assisted generation on a CPU for classes that transformers marks as stateful."""
    changes: list[tuple[Any, str, Any]] = []
    for owner in owners:
        if isinstance(owner, type):
            if _STATEFUL in vars(owner) and not owner.__name__.startswith(_ELSEWHERE):
                changes.append((owner, _STATEFUL, property(lambda self: self.device.type != "cpu")))
        elif getattr(owner, _STATEFUL, False) and not type(owner).__name__.startswith(_ELSEWHERE):
            changes.append((owner, _STATEFUL, _OffCpu(owner)))
    return changes
