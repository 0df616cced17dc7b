"""OLMo-hybrid: the gated delta rule behind norms, and softmax attention with norms behind it in one of four layers.

β is up to 2. Norms of q and k are of all heads together; released models rotate nothing. Two norms have one name in
released folders and another in transformers' models, and filters are three tensors there and one here.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.gated_delta import DeltaSizes, Gates, gated_delta
from tarnn.families.parts import Heads, attend, dense, embed, head, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, heads, products

KINDS = ("linear_attention", "full_attention")
NORM_EPS = 1e-5  # of the delta rule's outputs, whatever the config says
RELEASED = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


@dataclass(frozen=True)
class OlmoLayer:
    """Numbers that all layers share. strength: what β is multiplied with; bias: of softmax attention's products."""

    delta: DeltaSizes
    softmax: Heads
    inner: int
    eps: float
    strength: float
    bias: bool
    frequencies: Float[Tensor, " p"] | None

    @classmethod
    def of(cls, config: Config, hidden: int) -> "OlmoLayer":
        softmax = Heads.of(config, hidden)
        keys = config.size("linear_num_key_heads", softmax.queries)
        return cls(
            DeltaSizes.of(config, keys, softmax.queries, int(0.75 * hidden / keys)),
            softmax,
            inner=config.size("intermediate_size"),
            eps=config.number("rms_norm_eps", 1e-6, least=0),
            strength=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
            bias=config.flag("attention_bias", False),
            frequencies=rotation(config, softmax.width),
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    config.choice("hidden_act", "silu")
    config.skip("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    c = OlmoLayer.of(config, hidden)
    x = embed(config, weights, hidden)
    for i, kind in enumerate(layer_kinds(config)):
        w = weights.under(f"model.layers.{i}.")
        x = delta_layer(x, w, c) if kind == "linear_attention" else softmax_layer(x, w, c)
    return head(rms(x, weights, "model.norm", c.eps), config, weights, may_leave=("mtp.*",))


def delta_layer(x: Register, w: Weights, c: OlmoLayer) -> Register:
    """Record x + f(norm x) twice."""
    state = x.record.state("GatedDeltaState")
    h, part = rms(x, w, stored(w, "input_layernorm"), c.eps), w.under("linear_attn.")
    o = gated_delta(
        h, *projections(h, part, c.delta), part, c.delta, state, norm_name="o_norm", eps=NORM_EPS, strength=c.strength
    )
    x = x + dense(o, part, "o_proj", x.size)
    return x + swiglu(rms(x, w, stored(w, "post_attention_layernorm"), c.eps), w.under("mlp."), c.inner)


def softmax_layer(x: Register, w: Weights, c: OlmoLayer) -> Register:
    """Record x + norm(f(x)) twice."""
    h, g, d, part = c.softmax.queries, c.softmax.keys, c.softmax.width, w.under("self_attn.")
    q = rms(dense(x, part, "q_proj", h * d, bias=c.bias), part, "q_norm", c.eps)
    k = rms(dense(x, part, "k_proj", g * d, bias=c.bias), part, "k_norm", c.eps)
    v = dense(x, part, "v_proj", g * d, bias=c.bias)
    o = attend(heads(q, h), heads(k, g), heads(v, g), part, c.frequencies)
    o = dense(o, part, "o_proj", x.size, bias=c.bias)
    x = x + rms(o, w, stored(w, "post_attention_layernorm"), c.eps)
    return x + rms(swiglu(x, w.under("mlp."), c.inner), w, "post_feedforward_layernorm", c.eps)


def stored(w: Weights, name: str) -> str:
    """Return the name under which these weights have a norm."""
    return name if f"{name}.weight" in w else RELEASED[name]


def projections(x: Register, w: Weights, sizes: DeltaSizes) -> tuple[Register, Gates]:
    """Record q, k and v of a layer, and return the rows that gate it."""
    widths = {"q": sizes.all_keys, "k": sizes.all_keys, "v": sizes.all_values}
    qkv = products(x, *(w.get(f"{name}_proj.weight", (width, x.size)) for name, width in widths.items()))
    widths = {"g": sizes.all_values, "b": sizes.values, "a": sizes.values}
    return qkv, Gates(*(w.get(f"{name}_proj.weight", (width, x.size)) for name, width in widths.items()))


def rotation(config: Config, width: int) -> Float[Tensor, " p"] | None:
    """Return the frequencies of rotary positions; None where their base is null. Without `rope_parameters` it is 10,000."""
    given = config.get("rope_parameters")
    if isinstance(given, dict) and given.get("rope_theta", 0) is None and config.get("rope_theta") is None:
        config.inner("rope_parameters").skip("rope_type", "rope_theta")
        return None
    return rope_of(config, width).frequencies()


def layer_kinds(config: Config) -> tuple[str, ...]:
    """Return the kind of each layer: as listed, or softmax in every fourth, and in the last if there are fewer."""
    layers = config.size("num_hidden_layers")
    default = [KINDS[i % 4 == 3] for i in range(layers)]
    default[-1] = default[-1] if KINDS[1] in default else KINDS[1]
    return config.choices("layer_types", *KINDS, default=default, length=layers)
