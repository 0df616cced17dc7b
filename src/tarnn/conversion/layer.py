"""The attention of one converted layer: for each key/value head features, a window alone, or all keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tarnn.feature_maps import FeatureMap
from tarnn.ops.hybrid.op import hybrid_attention
from tarnn.ops.softmax.cache import KVCache
from tarnn.ops.softmax.op import softmax_attention
from tarnn.ops.state import State

MODES = ("features", "window", "exact")


class Heads(NamedTuple):
    """h query heads of width d, which share g key/value heads."""

    h: int
    g: int
    d: int


@dataclass(frozen=True, eq=False, repr=False)
class HeadStates(State):
    """A layer's state: one `HybridState` or `KVCache` for each mode that its heads have, in the order of `MODES`."""

    parts: tuple[State, ...]

    @property
    def grows(self) -> bool:  # type: ignore[override]
        return any(part.grows for part in self.parts)

    @property
    def batch_size(self) -> int:
        return len(self.parts[0].k)  # type: ignore[attr-defined]  # of either kind


class LayerAttention(nn.Module):
    """Attention of one layer, with its own map and λ.

    modes: of each key/value head. options: those that were set; the others are the implementation's defaults.
    feature_map: of the heads with "features", in their order; None: far keys have no weight.
    """

    feature_map: FeatureMap | None

    def __init__(self, heads: Heads, modes: Sequence[str], options: Mapping[str, Any]):
        super().__init__()
        self.heads, self.modes, self.options = heads, tuple(modes), dict(options)
        self.feature_map = None
        self.far_bias = nn.Parameter(torch.zeros(heads.h))

    @torch.no_grad()
    def set_bias(self, far_bias: Any) -> None:
        """λ: a number, or one for each query head."""
        value = torch.as_tensor(far_bias, dtype=self.far_bias.dtype)
        if value.ndim and value.shape != self.far_bias.shape:
            raise ValueError(
                f"far_bias is a number or one for each of {self.heads.h} query heads; got {tuple(value.shape)}."
            )
        self.far_bias.copy_(value)

    def heads_with(self, mode: str) -> list[int]:
        """The numbers of the key/value heads that have this mode."""
        return [i for i, x in enumerate(self.modes) if x == mode]

    @property
    def grows(self) -> bool:
        """Whether it keeps all keys of some head."""
        return "exact" in self.modes

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        softcap: float | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: HeadStates | None = None,
        return_state: bool = False,
        inplace: bool = False,
        **keys: Any,
    ) -> tuple[Tensor, HeadStates | None]:
        """q (b, h, t, d), k and v (b, g, t, ·) → o (b, h, t, e), and with `return_state` the state after them.

        keys: window, sinks, slots and far_until, as `hybrid_attention` takes them.
        """
        if scale is not None:  # maps estimate e^(q·k/√d)
            q = q * (scale * self.heads.d**0.5)
        shared: dict[str, Any] = {
            "causal": causal,
            "key_mask": key_mask,
            "cu_seqlens": cu_seqlens,
            "return_state": return_state,
        }
        options: dict[str, Any] = {"softcap": softcap, "inplace": inplace, **keys, **shared}
        present = [mode for mode in MODES if mode in self.modes]
        befores: Any = [None] * len(present) if state is None else state.parts
        outputs, states = {}, []
        for mode, before in zip(present, befores):
            q_here, k_here, v_here = (x if len(present) == 1 else self.select_heads(x, mode) for x in (q, k, v))
            if mode == "exact":
                o = exact_attention(q_here, k_here, v_here, softcap=softcap, state=before, **shared)
            else:
                phi = self.feature_map if mode == "features" else None
                bias = self.far_bias if len(present) == 1 else self.select_heads(self.far_bias[None], mode)[0]
                o = hybrid_attention(q_here, k_here, v_here, phi, far_bias=bias, state=before, **options)
            outputs[mode] = o[0] if return_state else o
            states += [o[1]] if return_state else []
        return self.merge_heads(outputs), HeadStates(tuple(states)) if return_state else None

    def select_heads(self, x: Tensor, mode: str) -> Tensor:
        """The heads of x (b, g·r, …) that have this mode."""
        return x.unflatten(1, (self.heads.g, -1))[:, self.heads_with(mode)].flatten(1, 2)

    def merge_heads(self, outputs: dict[str, Tensor]) -> Tensor:
        """Put the heads of all modes back in their order, (b, h, t, e)."""
        if len(outputs) == 1:
            return next(iter(outputs.values()))
        r = self.heads.h // self.heads.g
        order = torch.tensor([i for mode in outputs for i in self.heads_with(mode)]).argsort()
        return torch.cat([o.unflatten(1, (-1, r)) for o in outputs.values()], 1)[:, order].flatten(1, 2)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    softcap: float | None,
    state: KVCache | None,
    return_state: bool,
) -> Any:
    """Softmax over all keys. A cache doubles when it is full, so that a token is appended in O(1)."""
    if softcap is not None:
        raise ValueError('heads of mode "exact" have no soft cap (attn_logit_softcapping); give them a mode that has.')
    options: dict[str, Any] = {"causal": causal, "key_mask": key_mask}
    if cu_seqlens is not None:
        return softmax_attention(q, k, v, causal=causal, cu_seqlens=cu_seqlens)
    if not return_state:
        return softmax_attention(q, k, v, **options)
    if state is None:
        state = KVCache.empty(
            k.shape[0], k.shape[1], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype, device=k.device
        )
    state = state.with_room(k.shape[2])
    return softmax_attention(q, k, v, state=state, return_state=True, inplace=not torch.is_grad_enabled(), **options)
