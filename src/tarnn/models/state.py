"""The state of a whole model as a value: one state per layer, and how far each row has come."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from tarnn.ops import State


@dataclass(frozen=True, eq=False, repr=False)
class ModelState(State):
    """The state of a model after the tokens so far.

    layers: one state per layer: `LinearState`, `KVCache`, or `NoState` for a layer without attention; of a layer with a
        convolution two, first a `ConvolutionState`.
    position: the number of tokens that each row has seen, padding left out.
    """

    layers: tuple[State, ...]
    position: Int[Tensor, " b"]

    @property
    def nbytes(self) -> int:
        """The bytes allocated for the layers' states."""
        return sum(layer.nbytes for layer in self.layers)
