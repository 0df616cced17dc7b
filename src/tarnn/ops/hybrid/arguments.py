"""Arguments of hybrid attention, checked, with the features of a map; and how slots choose their keys.

The keys that features represent worst stay exact after they have left the window. A key's score is the logarithm of how much
too small its own weight would be if features estimated it:

    score_j = scale·k_j·k_j − log φ_q(k_j)·φ_k(k_j)          without features: scale·k_j·k_j

It depends on the key alone. So the slots hold, at each token, the c keys of the highest scores among those that have left
the window (of equal ones those that came first), and the key that loses its place enters the sums at that token. There is
no block in this definition: chunks and single tokens give the same slots. The choice has no gradient.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.kernels.hybrid import capped
from tarnn.kernels.tracing import is_untraced
from tarnn.numerics import wide, widen
from tarnn.ops.features import Features, raw_features
from tarnn.ops.states import HybridState


class Options(NamedTuple):
    """Options that all parts read; feature_map None: keys that are not exact are not seen."""

    feature_map: FeatureMap | None
    causal: bool
    window: int
    sinks: int
    slots: int
    scale: float
    softcap: float | None
    far_bias: Tensor | float  # λ, a number or (h,)
    exact_queries: Tensor | None
    far_until: int | None = None

    @property
    def log_features(self) -> bool:
        """Whether features are kept as logarithms, and their sums have a maximum for each (`tarnn.log_features`)."""
        return self.feature_map is not None and self.feature_map.log_features


def check_options(
    q, causal, window, sinks, slots, scale, softcap, far_bias, log_decay, state, return_state, exact_queries
) -> None:
    sizes = {"window": (window, 1), "sinks": (sinks, 0), "slots": (slots, 0)}
    for name, (size, least) in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or size < least:
            raise ValueError(f"{name} must be a whole number of tokens, {least} or more; got {size!r}.")
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False; got {causal!r}.")
    if scale is not None and not (_is_number(scale) and math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number, or None for 1/√d; got {scale!r}.")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"softcap must be a number above 0, or None for none; got {softcap!r}.")
    if not isinstance(far_bias, Tensor) and not _is_number(far_bias):
        raise ValueError(f"far_bias must be a number or a tensor (h,); got {far_bias!r}.")
    if isinstance(far_bias, Tensor) and far_bias.shape not in ((), (1,), (q.shape[1],)):
        raise ValueError(
            f"far_bias must be a number or (h,) = {(q.shape[1],)}, one per query head; got {tuple(far_bias.shape)}."
        )
    if 0 in (q.shape[1], q.shape[3]):
        raise ValueError(f"hybrid attention needs a head and a channel at least; got q {tuple(q.shape)}.")
    if log_decay is not None and log_decay.ndim == 4:
        raise ValueError(
            f"hybrid attention takes log_decay (g,) or (b, g, t): exact keys have no channels; got {tuple(log_decay.shape)}."
        )
    if log_decay is not None and log_decay.is_cpu and is_untraced(q) and bool((log_decay > 0).any()):
        raise ValueError(
            f"log_decay must be ≤ 0: keys fade, never grow; got {log_decay.max().item():.3g}. Pass the logarithm of a factor."
        )
    if exact_queries is not None and not (
        isinstance(exact_queries, Tensor)
        and exact_queries.ndim == 1
        and exact_queries.dtype in (torch.int32, torch.int64)
    ):
        raise TypeError(
            f"exact_queries must be a tensor of places (n,), int64; got {exact_queries!r}. Pass torch.tensor([0])."
        )
    if state is not None and not isinstance(state, HybridState):
        raise TypeError(f"state must be a HybridState, which hybrid_attention returns; got {type(state).__name__}.")
    if not causal and (state is not None or return_state):
        raise ValueError("attention to both sides has no state: it would also need what comes after.")
    if exact_queries is not None and state is not None:
        raise ValueError("exact_queries see every key, but a state keeps few; pass one of the two.")


def check_lengths(q: Tensor, k: Tensor) -> None:
    t, length = q.shape[2], k.shape[2]
    if length != t:
        raise ValueError(f"hybrid attention is self-attention: as many keys as queries; got {t} and {length}.")


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(x, bool)


def scaled_features(how: Options, x: Tensor, side: str, raw: Features | None = None) -> tuple[Tensor, Tensor]:
    """φ(x), or log φ(x) of a map with `log_features`, and its log-scale (b, h, t), of queries with λ; both wide."""
    assert how.feature_map is not None
    kind = wide(x.dtype)
    phi, scale = raw or raw_features(how.feature_map, x, side)
    scale = torch.zeros_like(phi[..., 0]) if scale is None else scale
    if side == "queries":
        bias = torch.as_tensor(how.far_bias, device=x.device).to(kind)
        scale = scale.to(kind) + bias.expand(x.shape[1])[:, None]
    return phi.to(kind), scale.to(kind)


def within(how: Options, a: Tensor, place: Tensor) -> Tensor:
    """Log-scales (b, h, t) of queries at these places (b, t), −∞ from far_until on: those don't see estimated keys."""
    return a if how.far_until is None else a.masked_fill((place >= how.far_until)[:, None], -torch.inf)


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
