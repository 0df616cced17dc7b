"""What linear attention carries from token to token: its sums, of a size that does not grow."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

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
