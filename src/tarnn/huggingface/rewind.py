"""Going back: the last tokens that a layer of a cache has read, and states from which they can be read again."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

KEPT = 64  # how many tokens can be forgotten, at least
APART = 16  # tokens read one by one between two states that are kept
CHUNK = 64  # a sequence that is cut at multiples of it has the same bits

Replay = Callable[[Any, int], Any]  # (the state before a stretch, n): the state after its first n tokens
Inputs = tuple[Tensor, ...]
Run = Callable[[Inputs, Any], tuple[Any, Any]]  # (inputs, the state before): the outputs, and the state after
_NOT_KEPT = object()


class Stretch(NamedTuple):
    """Tokens that were read in one call, and how to read the first of them once more."""

    state: Any  # before them; _NOT_KEPT where it follows from that of an earlier stretch
    num_tokens: int
    replay: Replay


class Rewindable:
    """A record by which a recurrent state can forget its last tokens: earlier states, and the tokens since then.

    Of tokens read one by one, one state in 16 is kept. What lies more than 64 tokens back is let go, stretch by stretch.
    """

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rewindable":
        made = Rewindable()
        made._stretches = copy.deepcopy(self._stretches, memo)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"_stretches": []}  # what reads again is made of functions, which no file holds

    @property
    def num_tokens(self) -> int:
        """How many tokens can be forgotten."""
        return sum(x.num_tokens for x in self._stretches)

    def add(self, state: Callable[[], Any], num_tokens: int, replay: Replay) -> None:
        """Take note of tokens. state(): the state before them, which stays as it is; asked for only if it is kept."""
        since = 0
        for stretch in self._stretches:
            since = stretch.num_tokens + (since if stretch.state is _NOT_KEPT else 0)
        keeps = not self._stretches or num_tokens > 1 or since >= APART
        self._stretches.append(Stretch(state() if keeps else _NOT_KEPT, num_tokens, replay))
        starts = [i for i, x in enumerate(self._stretches) if x.state is not _NOT_KEPT]
        for start in reversed(starts):
            if sum(x.num_tokens for x in self._stretches[start:]) >= KEPT:
                del self._stretches[:start]
                break

    def rewind(self, num_tokens: int) -> Any:
        """Forget the last tokens, 1 … self.num_tokens: the state before them."""
        left, remaining, cut = self.num_tokens - num_tokens, [], False
        state, unread = None, list[Stretch]()
        for stretch in self._stretches:
            if stretch.state is not _NOT_KEPT and not cut:  # a state after tokens that are forgotten is of no use
                state, unread = stretch.state, []
            if not left:
                break
            n = min(left, stretch.num_tokens)
            left, cut = left - n, n < stretch.num_tokens
            remaining.append(stretch._replace(num_tokens=n))
            unread.append(remaining[-1])
        for stretch in unread:
            state = stretch.replay(state, stretch.num_tokens)
        long = max((i + 1 for i, x in enumerate(remaining) if x.num_tokens > KEPT), default=0)
        self._stretches = remaining[long:]  # without a prompt, of which a layer keeps more than a few tokens
        return state

    def clear(self) -> None:
        """Forget how to go back."""
        self._stretches.clear()


def check_crop(tokens_to_remove: int, recorded: int) -> int:
    """How many tokens `crop(−n)` removes. Raises ValueError for more than were recorded, or a length."""
    if not 0 <= -tokens_to_remove <= recorded:
        raise ValueError(
            f"a state can't forget its last tokens unless they were recorded: crop(−n) takes n up to {recorded} "
            f"here; got crop({tokens_to_remove}). Call activate_past_recording() before they are read, propose at most "
            f"{KEPT} candidates at a time, or keep a copy of the state from there."
        )
    return -tokens_to_remove


def read_and_note(run: Run, inputs: Inputs, state: Any, note: Callable[[Any, int, Replay], None], time: int = 2) -> Any:
    """run(inputs, state); note(the state before, number of tokens, how to read them again). time: that axis of all tensors.

    Of a long sequence its last 64 to 127 tokens are noted, without the memory of the others.
    """
    t, earlier = inputs[0].shape[time], None
    if first := (t - KEPT) // CHUNK * CHUNK if t > KEPT else 0:
        before, inputs = zip(*(x.split([first, t - first], time) for x in inputs), strict=True)
        earlier, state = run(before, state)
        inputs = tuple(x.clone() for x in inputs)
    read = tuple(x.detach() for x in inputs)

    @torch.no_grad()
    def replay(state: Any, n: int) -> Any:
        return run(tuple(x.narrow(time, 0, n) for x in read), state)[1]

    note(state, t - first, replay)
    o, after = run(inputs, state)
    if earlier is not None:  # (b, t, …) in memory, as transformers' layers expect it
        o = torch.cat([earlier.movedim(time, 1), o.movedim(time, 1)], 1).movedim(1, time)
    return o, after


class CropsAsOne:
    """A cache in which a crop that some layer refuses leaves all of them as they were, and whose length is known.

    transformers counts keys; where no layer has any, an assistant's cache has the length that its linear layers count.
    """

    __slots__ = ()  # or no cache that exists could become one


@functools.cache
def _cropping_as_one(kind: Any) -> type:
    def crop(self: Any, tokens_to_remove: int) -> None:
        check_crop_of(self, tokens_to_remove)
        kind.crop(self, tokens_to_remove)

    def get_seq_length(self: Any, layer_idx: int = 0) -> int:
        count = getattr(_undo_of(self.layers[layer_idx]), "num_tokens", None)
        if count is None or any(isinstance(x, CacheLayerMixin) for x in self.layers):
            return kind.get_seq_length(self, layer_idx)
        return count

    croppable = property(lambda self: all(getattr(x, "record_past", False) or x.is_croppable for x in self.layers))
    reduced = lambda self, protocol: (_new, (kind,), vars(self))  # noqa: E731
    members = {"crop": crop, "get_seq_length": get_seq_length, "is_croppable": croppable, "__reduce_ex__": reduced}
    return type(f"Undoing{kind.__name__}", (kind, CropsAsOne), members)


def _new(kind: Any) -> Any:
    """A cache of `CropsAsOne` with nothing in it, as pickle makes it first."""
    return object.__new__(_cropping_as_one(kind))


def crop_as_one(cache: Cache) -> None:
    """Make a cache one of `CropsAsOne`."""
    if not isinstance(cache, CropsAsOne):
        cache.__class__ = _cropping_as_one(cast(Any, type(cache)))


def check_crop_of(cache: Cache, tokens_to_remove: int) -> None:
    """Raise ValueError where some layer of a cache can't forget so many tokens."""
    for layer in cache.layers:
        if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
            check_crop(tokens_to_remove, _beyond_window(layer))
        elif hasattr(undo := _undo_of(layer), "check_crop"):
            undo.check_crop(tokens_to_remove)


def _undo_of(layer: Any) -> Any:
    """Return the object that rewinds a layer: the layer itself, or the one that a patched model has left there."""
    return getattr(layer, "tarnn_undo", layer)


def _beyond_window(layer: Any) -> int:
    """How many tokens a layer with a window can forget: while it holds all, any; then those that it holds beside the window."""
    held = layer.keys.shape[-2]
    return held if held == layer.cumulative_length else held - layer.sliding_window + 1
