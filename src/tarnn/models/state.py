"""The state of a whole model as a value: one state a layer, and how far each row has come."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tarnn.ops import KVCache, LinearState


@dataclass
class ModelState:
    """What a model remembers of the tokens so far.

    layers: one state a layer: `LinearState`, `KVCache`, or `()` for a layer without attention.
    position: (b,) int64, the number of tokens that each row has seen, padding left out.
    """

    layers: list[LinearState | KVCache | tuple]
    position: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the layers' states take; what a key/value cache has allocated counts in full."""
        return sum(layer.nbytes for layer in self.layers if layer != ())

    def reorder(self, index: Tensor) -> "ModelState":
        """A new state with the rows of the batch picked by `index`: beams, forks, a copy."""
        index = index.to(self.position.device)
        return ModelState(
            [layer.reorder(index) if layer else () for layer in self.layers], self.position[index]
        )

    def to(self, device: torch.device | str) -> "ModelState":
        """The same state on another device."""
        return ModelState([_to(layer, device) for layer in self.layers], self.position.to(device))


def _to(layer: LinearState | KVCache | tuple, device):
    if isinstance(layer, KVCache):
        mask = None if layer.mask is None else layer.mask.to(device)
        return KVCache(layer.k.to(device), layer.v.to(device), layer.length, mask)
    return layer.map(lambda x: x.to(device)) if layer else ()
