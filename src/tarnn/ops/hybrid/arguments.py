"""From the arguments of hybrid attention to what all of its parts need to know: checked, with the features of a map."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.feature_maps.base import FeatureMap
from tarnn.kernels.plain import is_plain
from tarnn.numerics import wide
from tarnn.ops.features import Features, raw_features
from tarnn.ops.hybrid.state import HybridState


class Options(NamedTuple):
    """What all parts need to know; feature_map None: keys that are not exact are not seen."""

    feature_map: FeatureMap | None
    causal: bool
    window: int
    sinks: int
    slots: int
    scale: float
    softcap: float | None
    far_bias: Tensor | float  # λ, a number or (h,)
    exact_queries: Tensor | None
    global_places: Tensor | None = None
    far_until: int | None = None

    @property
    def log_features(self) -> bool:
        """Whether features are kept as logarithms, and their sums have a maximum for each (`tarnn.units`)."""
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
    if log_decay is not None and log_decay.is_cpu and is_plain(q) and bool((log_decay > 0).any()):
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


def check_global_tokens(global_tokens: Any, q: Tensor, causal: bool) -> None:
    """Raises TypeError or ValueError for anything but None, a mask (b, t) or places (n,), and where attention is causal."""
    if global_tokens is None:
        return
    if causal:
        raise ValueError(
            "a global token sees what comes after it, so global_tokens need causal=False; got causal=True. For first tokens "
            "that all later ones see exactly pass sinks=."
        )
    if not isinstance(global_tokens, Tensor) or global_tokens.dtype not in (torch.bool, torch.int32, torch.int64):
        got = global_tokens.dtype if isinstance(global_tokens, Tensor) else repr(global_tokens)
        raise TypeError(
            f"global_tokens must be a tensor, a bool mask (b, t) or places (n,), int64; got {got}. Pass torch.tensor([0])."
        )
    mask, expected = global_tokens.dtype == torch.bool, (*q.shape[:1], *q.shape[2:3])
    if (mask and global_tokens.shape != expected) or (not mask and global_tokens.ndim != 1):
        raise ValueError(
            f"global_tokens must be a bool mask (b, t) = {expected} or places (n,), int64; got {global_tokens.dtype} "
            f"{tuple(global_tokens.shape)}."
        )
    if not mask and global_tokens.is_cpu and is_plain(q) and bool((global_tokens < 0).any()):
        raise ValueError(
            f"global_tokens are places counted from 0 in each sequence; got {int(global_tokens.min())}. For tokens counted "
            "from the end pass a mask (b, t)."
        )


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
