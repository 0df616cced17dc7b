"""What a scan carries from token to token."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.ops.state import State


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
