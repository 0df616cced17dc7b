"""What hybrid attention carries from token to token: a store of exact keys of fixed size beside the sums of all others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tarnn.numerics import wide
from tarnn.ops.state import State


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

    def check(self, how: Any, dtype: torch.dtype) -> None:
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
