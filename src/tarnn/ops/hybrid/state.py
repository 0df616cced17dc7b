"""What hybrid attention carries from token to token: a store of exact keys of fixed size beside the sums of all others."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.numerics import wide
from tarnn.ops.state import State


class Options(NamedTuple):
    """What all parts need to know; feature_map None: keys that are not exact are not seen."""

    feature_map: FeatureMap | None
    causal: bool
    window: int
    sinks: int
    slots: int
    scale: float
    softcap: float | None
    far_bias: Tensor | float  # λ, a number or (h,)
    exact_queries: Tensor | None
    far_until: int | None = None

    @property
    def log_features(self) -> bool:
        """Whether features are kept as logarithms, and their sums have a maximum for each (`units.py`)."""
        return self.feature_map is not None and self.feature_map.log_features


class Keys(NamedTuple):
    """The window before, and behind it the new keys: w + t places, of which `there` says what is filled.

    A key's fade at new token i is clock_i + birth_j, in float64: differences of long sums.
    """

    k: Tensor  # (b, g, w + t, d)
    v: Tensor
    place: Tensor  # (b, w + t) in its sequence; below 0: none
    there: Tensor  # (b, w + t)
    birth: Tensor  # (b, g, w + t)
    clock: Tensor  # (b, g, t)
    sink_k: Tensor  # (b, g, s, d), those before and those among the new
    sink_v: Tensor
    sink_birth: Tensor
    real: Tensor  # (b, t)


@dataclass(frozen=True, eq=False, repr=False)
class HybridState(State):
    """What a sequence so far means to what comes after it: of constant size, however long it is.

    k, v (b, g, s + w + c, ·): the exact keys and values. First the s sinks; then the window as a ring, the token at place
    p at s + (p − s) mod w; then the c slots. fade (b, g, s + w + c): how much each of them has faded by now, log.
    score, place (b, g, c): of the keys in the slots, how badly features represent them (−∞: empty) and where they stood.
    S (b, g, f, e), z (b, g, f): the sums over all other keys, in units of e^M; M (b, g), or (b, g, f) for maps with
    `log_features`. count (b,): real tokens so far;
    room that no token has filled yet holds zeros.
    """

    k: Tensor
    v: Tensor
    fade: Tensor
    score: Tensor
    place: Tensor
    S: Tensor
    z: Tensor
    M: Tensor
    count: Tensor

    @classmethod
    def zeros(
        cls,
        k: Tensor,
        v: Tensor,
        num_features: int,
        *,
        window: int,
        sinks: int,
        slots: int = 0,
        batch_size: int | None = None,
        log_features: bool = False,
    ) -> "HybridState":
        """The state that has seen nothing, for keys and values like these."""
        b, g, n = (k.shape[0] if batch_size is None else batch_size), k.shape[1], sinks + window + slots
        S = k.new_zeros(b, g, num_features, v.shape[3], dtype=wide(k.dtype))
        maxima = (b, g, num_features) if log_features else (b, g)
        return cls(
            k.new_zeros(b, g, n, k.shape[3]),
            v.new_zeros(b, g, n, v.shape[3]),
            S.new_zeros(b, g, n),
            S.new_full((b, g, slots), -torch.inf),
            S.new_full((b, g, slots), -1, dtype=torch.int64),
            S,
            S.new_zeros(b, g, num_features),
            S.new_full(maxima, -torch.inf),
            torch.zeros(b, dtype=torch.int64, device=k.device),
        )

    def check(self, how: Options, dtype: torch.dtype) -> None:
        """ValueError for a state that was made with other options, or whose sums are not what inputs of this dtype need."""
        if self.S.dtype != wide(dtype):
            raise ValueError(
                f"the state is {self.S.dtype}, and inputs in {dtype} need {wide(dtype)}; cast the inputs, or "
                "begin a new state."
            )
        n, slots = how.sinks + how.window + how.slots, self.score.shape[2]
        if self.k.shape[2] != n or slots != how.slots:
            raise ValueError(
                f"this state has {self.k.shape[2] - slots} exact places and {slots} slots; expected "
                f"{how.sinks} sinks + window {how.window} and {how.slots} slots. Go on with the options that it was made with."
            )
        if self.M.shape != (self.z.shape if how.log_features else self.z.shape[:2]):
            raise ValueError(
                f"this state's M is {tuple(self.M.shape)}; with {type(how.feature_map).__name__} expected "
                f"{'(b, g, f)' if how.log_features else '(b, g)'}. Go on with the map that it was made with."
            )


def within(how: Options, a: Tensor, place: Tensor) -> Tensor:
    """Log-scales (b, h, t) of queries at these places (b, t), −∞ from far_until on: those don't see estimated keys."""
    return a if how.far_until is None else a.masked_fill((place >= how.far_until)[:, None], -torch.inf)


def places(how: Options, keys: Keys) -> Tensor:
    """How far each new token is in its sequence, (b, t); where not causal, how far the last one is, (b, 1)."""
    return keys.place[:, -keys.real.shape[1] :] if how.causal else keys.real.sum(-1, keepdim=True) - 1


def room_of(place: Tensor, how: Options) -> Tensor:
    """Where the store holds the token at this place, as long as it is exact."""
    return torch.where(place < how.sinks, place, how.sinks + (place - how.sinks).remainder(how.window))


def capped(products: Tensor, softcap: float | None) -> Tensor:
    return products if softcap is None else softcap * torch.tanh(products / softcap)


def at(x: Tensor, index: Tensor) -> Tensor:
    """(b, h, t, ·) at index (b, l) or (b, h, l) of time."""
    index = index if index.ndim == 3 else index[:, None].expand(-1, x.shape[1], -1)
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))
