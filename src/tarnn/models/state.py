"""The state of a whole model as a value: one state a layer, and how far each row has come."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tarnn.ops import KVCache, LinearState

State = LinearState | KVCache | tuple[()]
"""What one layer remembers; `()` for a layer without attention."""


@dataclass
class ModelState:
    """What a model remembers of the tokens so far.

    layers: one state a layer: `LinearState`, `KVCache`, or `()` for a layer without attention.
    position: (b,) int64, the number of tokens that each row has seen, padding left out.
    """

    layers: list[State]
    position: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the layers' states take; what a key/value cache has allocated counts in full."""
        return sum(layer.nbytes for layer in self.layers if isinstance(layer, LinearState | KVCache))

    def reorder(self, index: Tensor) -> "ModelState":
        """A new state with the rows of the batch picked by `index`: beams, forks, a copy."""
        index = index.to(self.position.device)
        return ModelState([rows(layer, index) for layer in self.layers], self.position[index])

    def to(self, device: torch.device | str) -> "ModelState":
        """The same state on another device."""
        return ModelState([_to(layer, device) for layer in self.layers], self.position.to(device))


def rows(layer: State, index: Tensor) -> State:
    """One layer's state with the rows of the batch picked by `index`, which is on the state's device."""
    return layer.reorder(index) if isinstance(layer, LinearState | KVCache) else ()


def _to(layer: State, device: torch.device | str) -> State:
    if isinstance(layer, KVCache):
        mask = None if layer.mask is None else layer.mask.to(device)
        return KVCache(layer.k.to(device), layer.v.to(device), layer.length, mask)
    return layer.map(lambda x: x.to(device)) if isinstance(layer, LinearState) else ()
