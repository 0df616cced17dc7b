"""What short convolution carries from token to token: the last few tokens themselves."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.ops.state import State


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
