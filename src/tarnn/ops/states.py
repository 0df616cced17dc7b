"""States of the ops: all that a sequence so far means to the next token, of a size that does not grow."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.numerics import wide
from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class LinearState(State):
    """S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) over the keys so far, decayed, in float32 (float64 for float64 inputs).

    Where keys carry log-weights, both sums are scaled by e^(−M), M the running maximum of those weights, so
    that they neither overflow nor underflow: the true sums are S·e^M and z·e^M. Without, M is None (0). Maps with
    `log_features`, and `key_log_weight` beside a decay per channel, have one M for each feature.
    Its size does not depend on how many tokens it has seen. `g` counts key/value heads.
    """

    S: Float[Tensor, "b g f e"]
    z: Float[Tensor, "b g f"]
    M: Float[Tensor, "b g"] | Float[Tensor, "b g f"] | None = None

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        num_kv_heads: int,
        num_features: int,
        head_dim: int,
        *,
        log_weights: bool = False,
        log_features: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LinearState":
        """The state that has seen nothing. `log_weights`: with room for M (at −∞: no key yet);
        `log_features`: for one M per feature, as maps with `log_features` need, and `key_log_weight` beside a decay per channel;
        exponential features beside such a decay take it too, and are then exact however far apart channels fade."""
        S = torch.zeros(batch_size, num_kv_heads, num_features, head_dim, dtype=dtype, device=device)
        z = S.new_zeros(batch_size, num_kv_heads, num_features)
        if log_features:
            return cls(S, z, torch.full_like(z, -torch.inf))
        return cls(S, z, S.new_full((batch_size, num_kv_heads), -torch.inf) if log_weights else None)


@dataclass(frozen=True, eq=False, repr=False)
class DeltaState(State):
    """S (b, n, d, e): what the keys so far are to be answered with, Sᵀk ≈ v, for n = max(g, m) heads.

    It is float32 for inputs of 32 and 16 bits (float64 for float64 ones): each token corrects what the tokens before it
    wrote, so rounding in S stays there. Models whose states are bfloat16 or float16 are continued by casting them first.
    """

    S: Float[Tensor, "b n d e"]

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "DeltaState":
        """The state that has seen nothing. num_heads: the larger of the numbers of key and value heads."""
        return cls(torch.zeros(batch_size, num_heads, key_dim, value_dim, dtype=dtype, device=device))


@dataclass(frozen=True, eq=False, repr=False)
class ScanState(State):
    """h, one number per channel (`diagonal_scan`) or n (`selective_scan`), float32 (float64 for float64 inputs)."""

    h: Float[Tensor, "b c"] | Float[Tensor, "b c n"]

    @classmethod
    def zeros(
        cls, batch_size: int, *shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> "ScanState":
        """The state that no token has reached yet. shape: c for `diagonal_scan`, c and n for `selective_scan`."""
        return cls(torch.zeros(batch_size, *shape, dtype=dtype, device=device))


@dataclass(frozen=True, eq=False, repr=False)
class FilteredScanState(State):
    """h of a scan whose inputs pass a filter, and the filter's last inputs; of a selective scan h lies number by number."""

    h: Float[Tensor, "b c"] | Float[Tensor, "b n c"]
    tokens: Float[Tensor, "b p c"]  # p = width of the filters − 1


@dataclass(frozen=True, eq=False, repr=False)
class ConvolutionState(State):
    """The last w − 1 real tokens of each sequence, the oldest first, in the dtype of the inputs; zeros before the first.

    They are kept as they came, so nothing is rounded, and a state in bfloat16 loses nothing either.
    """

    tokens: Float[Tensor, "b p c"]  # p = w − 1

    @classmethod
    def zeros(
        cls,
        batch_size: int,
        width: int,
        num_channels: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "ConvolutionState":
        """The state that has seen nothing, of filters of this width."""
        return cls(torch.zeros(batch_size, width - 1, num_channels, dtype=dtype, device=device))


@dataclass(frozen=True, eq=False, repr=False)
class HybridState(State):
    """A store of exact keys of fixed size beside the sums of all others: of constant size, however long the sequence is.

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
