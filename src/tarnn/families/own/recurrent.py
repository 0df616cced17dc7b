"""Layers that are a recurrence of their own: gated DeltaNet, Mamba-2, RWKV-7 (`tarnn.attention` has their formulas)."""

from torch import Tensor

from tarnn.families.own.attention import EPS, AttentionParts, log_decay
from tarnn.families.parts import dense
from tarnn.families.rwkv7_mixing import time_mixing
from tarnn.program.recording import Register, apply, delta, filter, heads, linear, norm, product

FILTER_WIDTH, STATE_SIZE = 4, 64  # by default


def gated_delta(x: Register, layer: AttentionParts) -> Register:
    """Record Gated DeltaNet: S ← (I − β k kᵀ) e^log_decay S + β k vᵀ over filtered q, k, v; q and k of length 1."""
    (h, g, d), weights, bias, hidden = layer.heads, layer.weights, layer.config.bias, x.size
    sizes, state = (h * d, g * d, g * d), x.record.state("GatedDeltaState")
    q, k, v = filter(_joined(x, layer, sizes), _filters(layer, sum(sizes)), state).split(*sizes)
    q = norm(heads(q, h), eps=1e-6, kind="l2") * d**-0.5
    k = norm(heads(k, g), eps=1e-6, kind="l2")
    beta = apply(dense(x, weights, "beta_proj", g, bias=bias, exact=True), "sigmoid")
    o = delta(q, k, heads(v, g), heads(beta, g), state, log_decay=log_decay(x, layer, d))
    gate = apply(dense(x, weights, "gate_proj", h * d, bias=bias), "silu")
    return dense(norm(o, weights.get("norm.weight", (d,)), eps=EPS) * gate, weights, "o_proj", hidden, bias=bias)


def mamba2(x: Register, layer: AttentionParts) -> Register:
    """Record Mamba-2: S ← e^(−Δ A) S + Δ k vᵀ, y = W norm((Sᵀq + D v) ⊙ silu(z)); one q and k for all heads."""
    (h, _, d), weights, bias, hidden = layer.heads, layer.weights, layer.config.bias, x.size
    n, state = layer.options.get("state_size", STATE_SIZE), x.record.state("Mamba2State")
    sizes = (h * d, n, n)
    weight = weights.get("in_proj.weight", (h * d + sum(sizes) + h, hidden))
    offset, dt_offset = None, weights.get("dt_bias", (h,))
    if bias:
        offset = weights.get("in_proj.bias", weight.shape[:1])
        offset, dt_offset = offset[:-h], dt_offset.double() + offset[-h:]
    gate, filtered = product(x, weight[:-h], offset).split(h * d, sum(sizes))
    dt = apply(heads(product(x, weight[-h:], dt_offset, exact=True), h), "softplus")
    taps, taps_bias = _filters(layer, filtered.size), weights.get("filter_bias", (filtered.size,))
    v, k, q = filter(filtered, taps, state, taps_bias).split(*sizes)
    v, fade = heads(v, h), dt * -weights.get("A_log", (h,)).double().exp()[:, None]
    o = linear(q, k, v * dt, state, log_decay=fade, normalize=False, keep_z=False)
    o = heads(o + v * weights.get("D", (h,))[:, None], 1) * apply(gate, "silu")
    return dense(norm(o, weights.get("norm.weight", (h * d,)), eps=1e-5), weights, "o_proj", hidden, bias=bias)


def rwkv7(x: Register, layer: AttentionParts) -> Register:
    """Record RWKV-7's time mixing, without values of the first layer."""
    return time_mixing(x, layer.weights.under("mixing."), layer.heads[0], x.record.state("Rwkv7State"), "last", None)[0]


def _joined(x: Register, layer: AttentionParts, sizes: tuple[int, ...]) -> Register:
    """Record the projections of queries, keys and values, side by side, as one filter reads them."""
    joined = x.record.room(sum(sizes))
    for name, n, part in zip(("q_proj", "k_proj", "v_proj"), sizes, joined.split(*sizes), strict=True):
        dense(x, layer.weights, name, n, bias=layer.config.bias, to=part)
    return joined


def _filters(layer: AttentionParts, channels: int) -> Tensor:
    return layer.weights.get("filters", (channels, layer.options.get("filter_width", FILTER_WIDTH)))
