"""How far linear attention with a map of softmax's kernel is from softmax attention: on your own q, k, v."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tarnn.feature_maps import FeatureMap
from tarnn.numerics import widen
from tarnn.ops import linear_attention, softmax_attention


@torch.no_grad()
def softmax_error(
    q: Float[Tensor, "b h t d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s e"],
    feature_map: FeatureMap,
    *,
    causal: bool,
    key_mask: Bool[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b h"]:
    """‖ô − o‖/‖o‖ for each row and head: o of softmax attention, ô of linear attention with `feature_map`.

    0.05 is a good stand-in, 1 is none at all. The kernel's scale is the map's. Signed maps are divided by the sum
    of their weights as the others are, which no training should do. In float32 at least; O(t·s) time.

    Raises ValueError for a map that is no estimate of softmax's kernel, having no scale.
    """
    scale = getattr(feature_map.inner, "scale", None)
    if scale is None and not feature_map.dot_product:
        raise ValueError(
            f"{type(feature_map).__name__} does not stand for softmax's kernel; such maps are PositiveRandomFeatures, "
            "Reparametrized, Taylor …"
        )
    q, k, v = widen(q), widen(k), widen(v)
    exact = softmax_attention(q, k, v, causal=causal, scale=scale, key_mask=key_mask)
    found = attend(q, k, v, feature_map, causal=causal, key_mask=key_mask)
    return (found - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))


def attend(
    q: Tensor, k: Tensor, v: Tensor, feature_map: FeatureMap, *, causal: bool, key_mask: Tensor | None = None
) -> Tensor:
    """Linear attention divided by the sum of its weights, be they negative or not."""
    phi = feature_map if feature_map.positive else _Divided(feature_map)
    o = linear_attention(q, k, v, phi, causal=causal, key_mask=key_mask)
    assert isinstance(o, Tensor)
    return o


class _Divided(FeatureMap):
    """A signed map that claims to be none: for a measurement, not for a model."""

    def __init__(self, feature_map: FeatureMap):
        super().__init__()
        self.queries, self.keys = feature_map.queries, feature_map.keys  # type: ignore[method-assign]
