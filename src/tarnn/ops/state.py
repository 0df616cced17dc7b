"""The state of linear attention as a value: all that a sequence so far means to what comes after it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor


class LinearState(NamedTuple):
    """S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j) over the keys so far, decayed, in float32 (float64 for float64 inputs).

    Where keys carry log-weights, both sums are scaled by e^(−M), M the running maximum of those weights, so
    that they neither overflow nor underflow: the true sums are S·e^M and z·e^M. Without, M is None (0).

    A state is a value: functions return new ones and leave the given one as it was. It may be saved, moved,
    reordered for beam search, forked and fed back. Its size does not depend on how many tokens it has seen.
    `g` counts key/value heads.
    """

    S: Float[Tensor, "b g f e"]
    z: Float[Tensor, "b g f"]
    M: Float[Tensor, "b g"] | None = None

    @classmethod
    def zeros(
        cls, batch_size: int, num_kv_heads: int, num_features: int, head_dim: int, *, log_weights: bool = False,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> "LinearState":  # fmt: skip
        """The state that has seen nothing. `log_weights`: with room for M (at −∞: no key yet)."""
        S = torch.zeros(batch_size, num_kv_heads, num_features, head_dim, dtype=dtype, device=device)
        z = S.new_zeros(batch_size, num_kv_heads, num_features)
        return cls(S, z, S.new_full((batch_size, num_kv_heads), -torch.inf) if log_weights else None)

    def map(self, f) -> "LinearState":
        """f applied to each tensor: `state.map(lambda x: x.to("cuda"))`."""
        return LinearState(f(self.S), f(self.z), None if self.M is None else f(self.M))

    def reorder(self, index: Int[Tensor, " k"]) -> "LinearState":
        """The rows of the batch picked by `index`: beams, forks."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)
