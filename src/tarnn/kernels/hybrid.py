"""A call of hybrid attention, a token of it, and what they give: the records that every backend takes and returns."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """Queries, and keys and values in a row: those of the window before, then the new ones. Real tokens stand in front.

    Features and their log-scales are None where keys that are not exact are not seen. phi_k and weight are those of the keys
    that enter the sums: (b, g, t, ·) where causal of the key that leaves the window at each new token, else of the new keys;
    with slots (b, g, c + w + t, ·) of all keys of the row, slots first, and it turns out here which of them enter.
    """

    q: Tensor  # (b, h, t, d)
    k: Tensor  # (b, g, w + t, d)
    v: Tensor  # (b, g, w + t, e)
    sink_k: Tensor  # (b, g, s, d)
    sink_v: Tensor  # (b, g, s, e)
    phi_q: Tensor | None  # (b, h, t, f) wide, as are all below; with log_features log φ
    a: Tensor | None  # (b, h, t)  log-scales of queries, with λ
    phi_k: Tensor | None
    weight: Tensor | None  # log-scales of keys, faded; −∞ for those that never enter the sums
    # so far as `Gradients` goes
    S: Tensor  # (b, g, f, e)  the sums before
    z: Tensor  # (b, g, f)
    M: Tensor  # (b, g), or (b, g, f) with log_features
    seen: Tensor  # (b,)  how many tokens each row had before, and
    length: Tensor  # (b,)  has now; what stands after them is not read
    # how much a key has faded at new token i: clock_i + birth_j, in the widest type; None where nothing fades
    clock: Tensor | None  # (b, g, t)
    birth: Tensor | None  # (b, g, w + t)
    sink_birth: Tensor | None  # (b, g, s)
    # the c slots before, None without slots
    slot_k: Tensor | None  # (b, g, c, d)
    slot_v: Tensor | None
    slot_birth: Tensor | None  # (b, g, c)
    slot_score: Tensor | None  # (b, g, c)  −∞: empty
    slot_place: Tensor | None  # (b, g, c)
    score: Tensor | None  # (b, g, w + t)  how badly features represent each key of the row
    window: int
    causal: bool
    scale: float
    softcap: float  # 0: none
    log_features: bool  # features are logarithms, and their sums have a maximum for each
    gradients_of_o_alone: bool  # what else is given has no gradient


class Outputs(NamedTuple):
    o: Tensor  # (b, h, t, e)  zeros at what is no token
    share: Tensor  # (b, h, t)  ρ
    S: Any  # the sums after the call
    z: Any
    M: Any
    log_total: Any = None  # (b, h, t)  the log of each query's denominator, for a backend's own backward
    slots: Any = None  # (b, g, c)  which keys of the row, slots first, are in the slots now
    score: Any = None  # (b, g, c)  their scores
    joined: Any = None  # (b, h, t, 2)  to both sides: 0 where features of the keys before, or after, underflow


class Gradients(NamedTuple):
    q: Any
    k: Any
    v: Any
    sink_k: Any
    sink_v: Any
    phi_q: Any
    a: Any
    phi_k: Any
    weight: Any


class Token(NamedTuple):
    """One token per row, and the state before it, which it is written into."""

    q: Tensor  # (b, h, 1, d)
    k: Tensor  # (b, g, 1, d)
    v: Tensor  # (b, g, 1, e)
    phi_q: Tensor | None  # (b, h, 1, f)
    a: Tensor | None  # (b, h, 1)
    phi_k: Tensor | None  # (b, g, 1, f)  of the key in the room that the token takes
    weight: Tensor | None  # (b, g, 1)
    decay: Tensor | None  # (b, g, 1)
    store_k: Tensor  # (b, g, s + w + c, d)  the exact keys, and
    store_v: Tensor  # their values, and
    fade: Tensor  # (b, g, s + w + c)  how much they have faded
    seen: Tensor  # (b,)  how many tokens each row had
    S: Tensor
    z: Tensor
    M: Tensor
    # None without slots
    slot_score: Tensor | None  # (b, g, c)
    slot_place: Tensor | None  # (b, g, c)
    score: Tensor | None  # (b, g)  of the key in the room that the token takes
    slot_phi: Tensor | None  # (b, g, 1, f)  of the key in the slots that `weakest` names
    slot_weight: Tensor | None  # (b, g, 1)
    sinks: int
    window: int
    scale: float
    softcap: float
    log_features: bool


def capped(products: Tensor, softcap: float | None) -> Tensor:
    return softcap * torch.tanh(products / softcap) if softcap else products


def at(x: Tensor, index: Tensor) -> Tensor:
    """(b, h, t, ·) at index (b, l) or (b, h, l) of time."""
    index = index if index.ndim == 3 else index[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


def weakest(score: Tensor, place: Tensor) -> Tensor:
    """The slot (b, g, 1) whose key goes first: of the least score, of equal ones the last."""
    return place.masked_fill(score > score.amin(-1, keepdim=True), -2).argmax(-1, keepdim=True)


def room_of(place: Tensor, sinks: int, window: int) -> Tensor:
    """Where the store holds the token at this place, as long as it is exact."""
    return torch.where(place < sinks, place, sinks + (place - sinks).remainder(window))
