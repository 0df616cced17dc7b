"""What the delta rule carries from token to token: a matrix per head, of a size that does not grow."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.ops.state import State


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
