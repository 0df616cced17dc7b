"""A sequence where it stands: all that is needed to go on with it, and to know that it is this one."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from tarnn.models.state import ModelState


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state of one row after `tokens`, and the logits of the token that comes next, (1, v) float32.

    A value: nobody writes into it, so it may be shared by any number of sequences that go on from here. tokens: all of the
    sequence, int32, read or written alike; two snapshots of one model with the same tokens are the same to the last bit, if
    both are `proven`: a state that a client has sent, and what goes on from it, may be after other tokens than it says. So it is
    never found by its tokens.
    """

    state: ModelState
    logits: Float[Tensor, "1 v"]
    tokens: Int[np.ndarray, " t"]
    proven: bool = True

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return self.state.nbytes + self.logits.nbytes + self.tokens.nbytes
