"""Going back: the last tokens that a layer of a cache has read, and states from which they can be read again."""

from collections.abc import Callable
from typing import Any, NamedTuple

KEPT = 64  # how many tokens can be forgotten, at least
APART = 16  # tokens read one by one between two states that are kept

Again = Callable[[Any, int], Any]  # (the state before a stretch, n): the state after its first n tokens
_NOT_KEPT = object()


class Stretch(NamedTuple):
    """Tokens that were read in one call."""

    state: Any  # before them; _NOT_KEPT where it follows from that of an earlier stretch
    num_tokens: int
    again: Again


class Past:
    """What a recurrent state needs to forget its last tokens: states of before, and the tokens since then.

    Of tokens read one by one, one state in 16 is kept. What lies more than 64 tokens back is let go, stretch by stretch.
    """

    def __init__(self) -> None:
        self._stretches: list[Stretch] = []

    @property
    def num_tokens(self) -> int:
        """How many tokens can be forgotten."""
        return sum(x.num_tokens for x in self._stretches)

    def add(self, state: Callable[[], Any], num_tokens: int, again: Again) -> None:
        """Take note of tokens. state(): the state before them, which stays as it is; asked for only if it is kept."""
        since = 0
        for stretch in self._stretches:
            since = stretch.num_tokens + (since if stretch.state is _NOT_KEPT else 0)
        keeps = not self._stretches or num_tokens > 1 or since >= APART
        self._stretches.append(Stretch(state() if keeps else _NOT_KEPT, num_tokens, again))
        starts = [i for i, x in enumerate(self._stretches) if x.state is not _NOT_KEPT]
        for start in reversed(starts):
            if sum(x.num_tokens for x in self._stretches[start:]) >= KEPT:
                del self._stretches[:start]
                break

    def rewind(self, num_tokens: int) -> Any:
        """Forget the last tokens, 1 … self.num_tokens: the state before them."""
        left, remaining = self.num_tokens - num_tokens, []
        state, unread = None, list[Stretch]()
        for stretch in self._stretches:
            if stretch.state is not _NOT_KEPT:
                state, unread = stretch.state, []
            if not left:
                break
            n = min(left, stretch.num_tokens)
            left -= n
            remaining.append(stretch._replace(num_tokens=n))
            unread.append(remaining[-1])
        for stretch in unread:
            state = stretch.again(state, stretch.num_tokens)
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
