"""The gated delta rule as Qwen3.5, Qwen3-Next and OLMo-hybrid have it (Yang et al. 2024, arXiv 2412.06464).

q, k, v = silu(filters of W x), q and k of length 1     β = σ(W_b x)     g = −e^A softplus(W_a x + bias)
S ← e^g S, then S ← S + β k (v − kᵀS)ᵀ                  y = norm(Sᵀq / √d) ⊙ silu(W_z x)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.parts import rms, split_heads
from tarnn.families.weights import Weights
from tarnn.program.recording import LayerState, Register, apply, delta, filter, heads, norm, product
from tarnn.weight_files import FOREIGN


@dataclass(frozen=True)
class DeltaSizes:
    """Numbers of heads and their widths; neighbouring value heads may share a key head. taps: width of the filters."""

    keys: int
    values: int
    key_width: int
    value_width: int
    taps: int

    @classmethod
    def of(cls, config: Config, keys: int, values: int, key_width: int, value_width: int | None = None) -> "DeltaSizes":
        """Read them. The arguments are the family's defaults; value_width None: twice the keys' width."""
        keys, values = config.size("linear_num_key_heads", keys), config.size("linear_num_value_heads", values)
        if values % keys:
            config.refuse("linear_num_value_heads", values, f"a multiple of linear_num_key_heads ({keys})")
        key_width = config.size("linear_key_head_dim", key_width)
        value_width = config.size("linear_value_head_dim", value_width or 2 * key_width)
        return cls(keys, values, key_width, value_width, config.size("linear_conv_kernel_dim", 4, least=2))

    @property
    def all_keys(self) -> int:
        """Channels of all keys, and of all queries."""
        return self.keys * self.key_width

    @property
    def all_values(self) -> int:
        """Channels of all values."""
        return self.values * self.value_width

    @property
    def channels(self) -> int:
        """Channels that are filtered: queries, keys and values."""
        return 2 * self.all_keys + self.all_values


class Gates(NamedTuple):
    """Rows of the projections that gate: outputs, β, and what decays are made of."""

    z: Tensor
    b: Tensor
    a: Tensor


def gated_delta(
    x: Register,
    qkv: Register,
    gates: Gates,
    w: Weights,
    sizes: DeltaSizes,
    state: LayerState,
    *,
    norm_name: str = "norm",
    eps: float,
    strength: float = 1.0,
) -> Register:
    """Mix tokens by the delta rule, (values, value_width) per token. qkv: projections of x, not filtered yet.

    w: the layer's other tensors. strength: what β is multiplied with.
    """
    n = sizes.values
    keys = (sizes.keys, sizes.key_width)
    q, k, v = split_heads(filter(qkv, filters(w, sizes), state), keys, keys, (n, sizes.value_width))
    q, k = norm(q, eps=1e-6, kind="l2") * sizes.key_width**-0.5, norm(k, eps=1e-6, kind="l2")
    beta = apply(product(x, gates.b, exact=True), "sigmoid")
    beta = beta if strength == 1 else beta * strength
    rate = w.get("A_log", (n,)).double().exp().neg().float()
    log_decay = apply(product(x, gates.a, w.get("dt_bias", (n,)), exact=True), "softplus") * rate
    o = delta(q, k, v, heads(beta, n), state, log_decay=heads(log_decay, n))
    return rms(o, w, norm_name, eps) * heads(apply(product(x, gates.z), "silu"), n)


def filters(w: Weights, sizes: DeltaSizes) -> Float[Tensor, "channels taps"]:
    """Return the filters of q, k and v, which lie in one tensor or in three."""
    if "conv1d.weight" in w or "q_conv1d.weight" not in w:
        return w.get("conv1d.weight", (sizes.channels, 1, sizes.taps))[:, 0]
    names = [f"{x}_conv1d.weight" for x in "qkv"]
    shapes = [w.shape(name) for name in names]
    if {x[1:] for x in shapes} != {(1, sizes.taps)} or sum(x[0] for x in shapes) != sizes.channels:
        raise UserError(
            f"{w.place} has {', '.join(names)} of shapes {shapes} where the config calls for {sizes.channels} filters of width "
            f"{sizes.taps}. {FOREIGN}"
        )
    return torch.cat([w[name] for name in names])[:, 0]
