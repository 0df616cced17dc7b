"""Calibration: run the model on some data, and set the parameters that feature maps take from it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from tarnn.attention.linear import LinearAttention
from tarnn.feature_maps.statistics import FittedMap, Spread, spread_of


class Calibration:
    """Keep one layer's map fitted to all queries and keys that were observed so far."""

    def __init__(self, layer: LinearAttention):
        self.feature_map = cast(FittedMap, layer.feature_map)
        self.spreads: list[Spread] | None = None  # of queries and keys

    @torch.no_grad()
    def observe(self, q: Tensor, k: Tensor, *, query_mask: Tensor | None, key_mask: Tensor | None) -> None:
        heads, full = self.feature_map.num_heads, self.feature_map.full_spread
        masks = (query_mask, key_mask)
        new = [spread_of(x, heads, mask=mask, full=full).over_batch() for x, mask in zip((q, k), masks)]
        self.spreads = new if self.spreads is None else [old.merged(x) for old, x in zip(self.spreads, new)]
        self.feature_map.calibrate(*self.spreads)


def calibrated_layers(module: nn.Module) -> list[LinearAttention]:
    """The layers whose feature maps are to be calibrated."""
    layers = (x for x in module.modules() if isinstance(x, LinearAttention) and not x.fits_by_call)
    return [x for x in layers if isinstance(x.feature_map, FittedMap) and x.feature_map.adapts]


@contextmanager
def calibrating(module: nn.Module) -> Iterator[None]:
    """Fit the maps of `module`, in each forward within the `with`, to all queries and keys observed so far.

    A layer's map is fitted before it is used, so the layers after it get the inputs that they will get from then on:

        with torch.no_grad(), calibrating(model):
            model(input_ids)            # a few thousand tokens, in one batch or several

    Masked tokens don't count. The parameters (centres, stretches, A …) are buffers, saved with the model. Any values are
    exact; the better they fit, the less the estimates vary.

    Raises ValueError where `module` has no such map.
    """
    layers = calibrated_layers(module)
    if not layers:
        raise ValueError(
            f"{type(module).__name__} has no layer whose feature map is calibrated; such maps are Reparametrized, "
            'OptimalRandomFeatures and SderfFeatures with fit="calibrated".'
        )
    for layer in layers:
        layer.calibration = Calibration(layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.calibration = None
