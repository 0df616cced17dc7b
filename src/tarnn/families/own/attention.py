"""Attention over heads of projected queries, keys and values: linear with every map, softmax, and none."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tarnn.attention.rotary import Rotary
from tarnn.families.maps import map_of, numbers_of
from tarnn.families.parts import dense
from tarnn.families.weights import Weights
from tarnn.feature_maps.base import FeatureMap, PositionalMap
from tarnn.feature_maps.statistics import FittedMap
from tarnn.models.config import ModelConfig
from tarnn.program import recording
from tarnn.program.hybrid import hybrid
from tarnn.program.recording import Register, apply, features, head_product, heads, norm, product, rotate

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


def softmax(x: Register, layer: AttentionParts) -> Register:
    """Record softmax attention to all tokens so far."""
    q, k, v = _placed(x, layer)
    o = recording.softmax(q, k, v, x.record.state("KVCache"), scale=q.width**-0.5)
    return dense(o, layer.weights, "o_proj", x.size, bias=layer.config.bias)


def window(x: Register, layer: AttentionParts) -> Register:
    """Record softmax attention to the last tokens and to the first."""
    q, k, v = _placed(x, layer)
    sizes = {"window": layer.options.get("window", 128), "sinks": layer.options.get("sinks", 0)}
    o = hybrid(q, k, v, reach=["window"] * k.heads, scale=q.width**-0.5, **sizes)
    return dense(o, layer.weights, "o_proj", x.size, bias=layer.config.bias)


def none(x: Register, layer: AttentionParts) -> Register:
    """Record W_o W_v x. Query heads that share a value share its product: their columns of W_o are added up."""
    (h, g, d), bias, hidden = layer.heads, layer.config.bias, x.size
    x.record.state("NoState")
    v = dense(x, layer.weights, "v_proj", g * d, bias=bias)
    weight = layer.weights.get("o_proj.weight", (hidden, h * d))
    if h != g:
        weight = weight.double().view(hidden, g, h // g, d).sum(2).flatten(1)
    return product(v, weight, layer.weights.get("o_proj.bias", (hidden,)) if bias else None)


def linear(x: Register, layer: AttentionParts) -> Register:
    """Record linear attention. Rotary positions rotate q and k where φ(q)·φ(k) depends on q·k, otherwise the features."""
    config, weights = layer.config, layer.weights
    phi = _feature_map(layer)
    q, k, v = _vectors(x, layer)
    frequencies = _frequencies(layer, phi)
    if frequencies is not None and phi.dot_product:
        q, k = rotate(q, frequencies), rotate(k, frequencies)
    d = config.head_dim
    q, q_scale = features(q, **numbers_of(phi, d, "queries"))
    k, k_scale = features(k, **numbers_of(phi, d, "keys"))
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
        q_scale=q_scale if phi.log_scaled and not config.normalize else None,
        k_scale=k_scale if phi.log_scaled else None,
        denominator=denominator,
        normalize=config.normalize,
    )
    if not config.normalize:
        o = norm(o, weights.get("o_norm.weight", (v.width,)), eps=EPS)
    return dense(o, weights, "o_proj", x.size, bias=config.bias)


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
        heads(dense(x, weights, name, n * d, bias=layer.config.bias), n)
        for name, n in (("q_proj", h), ("k_proj", g), ("v_proj", g))
    )
    if layer.config.qk_norm:
        q, k = (norm(y, weights.get(f"{name}_norm.weight", (d,)), eps=EPS) for name, y in (("q", q), ("k", k)))
    return q, k, v


def _placed(x: Register, layer: AttentionParts) -> tuple[Register, Register, Register]:
    """Record `_vectors`, with q and k at their positions if these are rotary."""
    q, k, v = _vectors(x, layer)
    if layer.config.position == "rotary":
        frequencies = Rotary(q.width, layer.config.rotary_base).frequencies()
        q, k = rotate(q, frequencies), rotate(k, frequencies)
    return q, k, v


def _feature_map(layer: AttentionParts) -> FeatureMap:
    """Make this layer's map. Raises ValueError for one that causal attention of this config can't have."""
    config, name = layer.config, layer.config.feature_map_of(layer.number)
    options = config.feature_map_options.get(name, {})
    phi = map_of(name, options, config.feature_map_sizes(), layer.weights.under("feature_map."))
    if phi.log_features or (isinstance(phi, FittedMap) and phi.fit == "call"):
        raise ValueError(
            f"linear attention of programs has no map that is fitted by the call or of logarithms; got {name}."
        )
    if config.normalize:
        phi.check_positive(config.head_dim)
    return phi


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
