"""What the delta rule carries from token to token."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.ops.state import State


@dataclass(frozen=True, eq=False, repr=False)
class DeltaState(State):
    """S (rows, n, d, e), float32 (float64 for float64 inputs): one matrix for each row and head, of a size that does not grow."""

    S: Float[Tensor, "rows n d e"]
