"""Slots: the keys that features represent worst stay exact after they have left the window.

A key's score is the logarithm of how much too small its own weight would be if features estimated it:

    score_j = scale·k_j·k_j − log φ_q(k_j)·φ_k(k_j)          without features: scale·k_j·k_j

It depends on the key alone. So the slots hold, at each token, the c keys of the highest scores among those that have left
the window (of equal ones those that came first), and the key that loses its place enters the sums at that token. There is
no block in this definition: chunks and single tokens give the same slots. The choice has no gradient.
"""

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.kernels.hybrid import capped
from tarnn.numerics import widen
from tarnn.ops.features import Features, raw_features


@torch.no_grad()
def scores(
    feature_map: FeatureMap | None, k: Tensor, scale: float, softcap: float | None, as_key: Features | None = None
) -> Tensor:
    """(b, g, t) of keys (b, g, t, d). as_key: `raw_features` of them, if they are there already."""
    x = widen(k)
    exact = capped(scale * x.square().sum(-1), softcap)
    if feature_map is None:
        return exact
    (phi_q, a), (phi_k, w) = raw_features(feature_map, k, "queries"), as_key or raw_features(feature_map, k, "keys")
    if feature_map.log_features:
        return exact - (phi_q + phi_k).logsumexp(-1)
    estimate = (phi_q * phi_k).sum(-1).log()
    for scale_of in (a, w):
        estimate = estimate if scale_of is None else estimate + scale_of
    # features that underflow: such keys are the worst there are, and still have an order among them
    return exact - estimate.clamp(min=-1e4)
