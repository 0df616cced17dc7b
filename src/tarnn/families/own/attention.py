"""Attention over heads of projected queries, keys and values: linear with every map, softmax, and none."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tarnn.attention.rotary import Rotary
from tarnn.families.own.maps import features_of, map_of
from tarnn.families.weights import Weights
from tarnn.feature_maps.base import PositionalMap
from tarnn.models.config import ModelConfig
from tarnn.program import recording
from tarnn.program.recording import Register, apply, head_product, heads, norm, product, rotate

EPS = 1e-6  # of norms of queries, keys and outputs


class AttentionParts(NamedTuple):
    """One layer of which the attention is to be recorded: sizes, weights, options of its kind."""

    config: ModelConfig
    number: int
    weights: Weights
    options: dict[str, Any]

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, channels of each."""
        return self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim


Attention = Callable[[Register, AttentionParts], Register]  # from a layer's input to what is added to the residual


def project(
    x: Register, weights: Weights, name: str, outputs: int, bias: bool = False, exact: bool = False
) -> Register:
    """Record the linear layer of this name."""
    weight = weights.get(f"{name}.weight", (outputs, x.size))
    return product(x, weight, weights.get(f"{name}.bias", (outputs,)) if bias else None, exact=exact)


def softmax(x: Register, layer: AttentionParts) -> Register:
    """Record softmax attention to all tokens so far."""
    q, k, v = _vectors(x, layer)
    if layer.config.position == "rotary":
        turns = Rotary(layer.config.head_dim, layer.config.rotary_base).frequencies()
        q, k = rotate(q, turns), rotate(k, turns)
    o = recording.softmax(q, k, v, x.record.state("KVCache"), scale=layer.config.head_dim**-0.5)
    return project(o, layer.weights, "o_proj", x.size, layer.config.bias)


def none(x: Register, layer: AttentionParts) -> Register:
    """Record W_o W_v x. Query heads that share a value share its product: their columns of W_o are added up."""
    (h, g, d), bias, hidden = layer.heads, layer.config.bias, x.size
    x.record.state("NoState")
    v = project(x, layer.weights, "v_proj", g * d, bias)
    weight = layer.weights.get("o_proj.weight", (hidden, h * d))
    if h != g:
        weight = weight.double().view(hidden, g, h // g, d).sum(2).flatten(1)
    return product(v, weight, layer.weights.get("o_proj.bias", (hidden,)) if bias else None)


def linear(x: Register, layer: AttentionParts) -> Register:
    """Record linear attention. Rotary positions rotate q and k where φ(q)·φ(k) depends on q·k, otherwise the features."""
    config, weights = layer.config, layer.weights
    phi = map_of(config, layer.number, weights.under("feature_map."))
    q, k, v = _vectors(x, layer)
    frequencies = _frequencies(layer, phi)
    if frequencies is not None and phi.dot_product:
        q, k = rotate(q, frequencies), rotate(k, frequencies)
    (q, q_scale), (k, k_scale) = features_of(q, phi, "queries"), features_of(k, phi, "keys")
    denominator = None
    if frequencies is not None and not phi.dot_product:
        denominator = (q, k) if config.normalize else None
        q, k = rotate(q, frequencies), rotate(k, frequencies)
    o = recording.linear(
        q,
        k,
        v,
        x.record.state("LinearState"),
        log_decay=log_decay(x, layer, q.width),
        q_scale=None if config.normalize else q_scale,
        k_scale=k_scale,
        denominator=denominator,
        normalize=config.normalize,
    )
    if not config.normalize:
        o = norm(o, weights.get("o_norm.weight", (v.width,)), eps=EPS)
    return project(o, weights, "o_proj", x.size, config.bias)


def log_decay(x: Register, layer: AttentionParts, width: int) -> Register | Float[Tensor, " g"] | None:
    """Record the logarithm of what a state fades by: per head, token or channel (`tarnn.attention.decay`).

    width: numbers of a key.
    """
    kind, g, weights = layer.config.decay, layer.heads[1], layer.weights.under("decay.")
    if kind == "none":
        return None
    if kind == "head":
        return weights.get("log_decay", (g,))
    if kind == "token":
        steps = product(x, weights.get("gate.weight", (g, x.size)), weights.get("bias", (g,)), exact=True)
        return apply(apply(heads(steps, g), "softplus"), "neg")
    if kind != "channel":
        raise ValueError(f"decay = {kind!r} has no program; expected none, head, token or channel.")
    low = product(x, weights.get("down.weight", (weights.shape("down.weight")[0], x.size)), exact=True)
    up, bias = weights.get("up.weight", (g * width, low.size)), weights.get("up.bias", (g * width,))
    return apply(head_product(low, up.unflatten(0, (g, width)), bias.view(g, width)), "log_sigmoid") * (1 / 16)


def _vectors(x: Register, layer: AttentionParts) -> tuple[Register, Register, Register]:
    """Record projections to heads, with norms of queries and keys if the config has them."""
    (h, g, d), weights = layer.heads, layer.weights
    q, k, v = (
        heads(project(x, weights, name, n * d, layer.config.bias), n)
        for name, n in (("q_proj", h), ("k_proj", g), ("v_proj", g))
    )
    if layer.config.qk_norm:
        q, k = (norm(y, weights.get(f"{name}_norm.weight", (d,)), eps=EPS) for name, y in (("q", q), ("k", k)))
    return q, k, v


def _frequencies(layer: AttentionParts, phi: Any) -> Tensor | None:
    """Return the frequencies of rotary positions. Raises ValueError for combinations that have no meaning."""
    config = layer.config
    if config.position != "rotary":
        return None
    if not phi.dot_product and (phi.log_scaled or isinstance(phi, PositionalMap) or config.decay == "channel"):
        raise ValueError(
            f"rotary positions go neither with a decay of channels nor with {type(phi).__name__}; expected another position."
        )
    return Rotary(
        config.head_dim if phi.dot_product else phi.num_features(config.head_dim), config.rotary_base
    ).frequencies()
