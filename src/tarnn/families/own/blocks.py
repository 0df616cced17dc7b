"""Blocks of tarnn's own models: attention and feed-forward, each with a norm and a residual, and convolutions before them."""

from collections.abc import Callable, Mapping

from tarnn.families.own.attention import Attention, AttentionParts, linear, none, softmax, window
from tarnn.families.own.recurrent import gated_delta, mamba2, rwkv7
from tarnn.families.parts import dense
from tarnn.families.weights import Weights
from tarnn.models.config import ModelConfig
from tarnn.program.recording import Register, apply, filter, norm

ATTENTIONS: Mapping[str, tuple[Attention, tuple[str, ...]]] = {  # by name: the function and its options
    "linear": (linear, ()),
    "softmax": (softmax, ()),
    "window": (window, ("window", "sinks")),
    "none": (none, ()),
    "gated_delta": (gated_delta, ("filter_width",)),
    "mamba2": (mamba2, ("filter_width", "state_size")),
    "rwkv7": (rwkv7, ()),
}


def blocks(x: Register, config: ModelConfig, weights: Weights) -> Register:
    """Record all blocks and the final norm. weights: of `Backbone`.

    Reversible blocks have two streams: attention reads the second and adds to the first, the feed-forward the other way round.
    """
    first = second = x
    for i in range(config.num_hidden_layers):
        block = Block(config, i, weights.under(f"layers.{i}."))
        if config.conv_kernel is not None:
            first = second = block.added("convolution", first, first, block.convolution)
        first = block.added("attention", first, second, block.attention)
        second = second if config.reversible else first
        if config.mlp != "none":
            second = block.added("mlp", second, first, block.mlp)
        first = first if config.reversible else second
    if config.norm_position == "post":
        return first
    x = (first + second) * 0.5 if config.reversible else first
    return normed(x, config, weights.under("norm."))


class Block:
    """One layer. Its states are those of its convolution, if it has one, and of its attention."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights):
        self.config, self.layer, self.weights = config, layer, weights

    def added(self, name: str, x: Register, y: Register, part: Callable[[Register], Register]) -> Register:
        """Record x + part(norm y), or norm(x + part(y))."""
        weights = self.weights.under(f"{name}_norm.")
        if self.config.norm_position == "pre":
            return x + part(normed(y, self.config, weights))
        return normed(x + part(y), self.config, weights)

    def attention(self, x: Register) -> Register:
        """Record this layer's kind of attention. Raises ValueError for a kind that is not known here."""
        kind = self.config.attention_of(self.layer)
        if kind not in ATTENTIONS:
            raise ValueError(f"attention {kind!r} has no program; expected {', '.join(ATTENTIONS)}.")
        (record, known), options = ATTENTIONS[kind], self.config.attention_options.get(kind, {})
        for name, value in options.items():
            if name not in (*known, "dropout") or (name in known and type(value) is not int):
                raise ValueError(f"attention {kind!r} has no option {name} = {value!r:.40} in programs.")
        return record(x, AttentionParts(self.config, self.layer, self.weights.under("attention."), options))

    def convolution(self, x: Register) -> Register:
        """Record a filter of each channel along time and a product that mixes the channels."""
        weights, width = self.weights.under("convolution."), self.config.conv_kernel or 1
        taps, bias = weights.get("weight", (x.size, width)), weights.get("bias", (x.size,))
        y = filter(x, taps, x.record.state("ConvolutionState"), bias)
        return dense(y, weights, "out_proj", x.size, bias=self.config.bias)

    def mlp(self, x: Register) -> Register:
        """Record down(silu(gate x) ⊙ up x), or down(f(up x)), f = gelu or relu²."""
        weights, inner, bias = self.weights.under("mlp."), self.config.intermediate_size, self.config.bias
        y = dense(x, weights, "up_proj", inner, bias=bias)
        gated = self.config.mlp == "swiglu"
        y = apply(dense(x, weights, "gate_proj", inner, bias=bias), "silu") * y if gated else apply(y, self.config.mlp)
        return dense(y, weights, "down_proj", x.size, bias=bias)


def normed(x: Register, config: ModelConfig, weights: Weights) -> Register:
    """Record a norm of all channels."""
    bias = weights.get("bias", (x.size,)) if config.norm == "layer" else None
    return norm(x, weights.get("weight", (x.size,)), bias, eps=config.norm_eps, kind=config.norm)
