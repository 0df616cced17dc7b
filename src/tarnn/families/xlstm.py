"""xLSTM, of mLSTM layers alone: linear attention whose keys enter and fade by exponential gates, and a SwiGLU each.

    S ← σ(f) S + e^i k vᵀ      z ← σ(f) z + e^i k      y = W_o (norm of heads(Sᵀq / max(|zᵀq|, 1)) ⊙ σ(W h))

Beck et al. 2024 (arXiv 2405.04517) and 2025 (arXiv 2503.13427). The gates' inputs and the logits are capped softly.
"""

from dataclasses import dataclass

from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.parts import dense, embed, head, swiglu
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, heads, linear, norm

MLP = ("proj_up_gate", "proj_up", "proj_down")
CHANGES_NOTHING = (
    "norm_reduction_force_float32",
    "chunkwise_kernel",
    "sequence_kernel",
    "step_kernel",
    "mode",
    "chunk_size",
    "return_last_states",
    "autocast_kernel_dtype",
    "inference_state_dtype",
    "max_inference_chunksize",
    "add_forward_backend_padding",
    "force_bos_token_insert",
    "igate_bias_init_range",
    "mlstm_round_up_to_multiple_of",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a block. keys, values: numbers of all heads."""

    heads: int
    keys: int
    values: int
    inner: int
    bias: bool
    norm_eps: float
    eps: float
    cap: float

    @classmethod
    def of(cls, config: Config, hidden: int) -> "Sizes":
        factors = (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0), ("ffn_proj_factor", 2.667))
        keys, values, inner = (hidden * config.number(key, x, least=0, most=1000) for key, x in factors)
        multiple, n = config.size("ffn_round_up_to_multiple_of", 64), config.size("num_heads", 8)
        if int(keys) % n or int(values) % n or not int(keys) or not int(values):
            config.refuse("num_heads", n, f"a divisor of {int(keys)} channels of keys and {int(values)} of values")
        return cls(
            n,
            int(keys),
            int(values),
            inner=int((inner + multiple - 1) // multiple * multiple),
            bias=config.flag("use_bias", False),
            norm_eps=config.number("norm_eps", 1e-6, least=0),
            eps=config.number("eps", 1e-6, least=1e-30),
            cap=config.number("gate_soft_cap", 15.0, least=1e-3),
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size", config.size("embedding_dim", 4096))
    layers = config.size("num_hidden_layers", config.size("num_blocks", 32))
    c, name = Sizes.of(config, hidden), "backbone.embeddings.weight"
    check_others(config, hidden, layers, c)
    x = embed(config, weights, hidden, name)
    for i in range(layers):
        w = weights.under(f"backbone.blocks.{i}.")
        x = x + mlstm(divided(x, w, "norm_mlstm", c), w.under("mlstm_layer."), c)
        x = x + swiglu(divided(x, w, "norm_ffn", c), w.under("ffn."), c.inner, bias=c.bias, names=MLP)
    x = norm(x, weights.get("backbone.out_norm.weight", (hidden,)), eps=c.norm_eps)
    return head(x, config, weights, name, tied=False, softcap=config.number("output_logit_soft_cap", 30.0, least=1e-3))


def check_others(config: Config, hidden: int, layers: int, c: Sizes) -> None:
    """Refuse what no released model has, and other values of keys that say again what others say."""
    again = {
        "embedding_dim": hidden,
        "num_blocks": layers,
        "head_dim": c.values // c.heads,
        "cell_norm_eps": c.norm_eps,
    }
    caps = dict.fromkeys(("input_gate_soft_cap", "forget_gate_soft_cap"), c.cap)
    parts = {"add_out_norm": True, "add_post_blocks_norm": True, "add_post_norm": False, "add_qk_norm": False}
    parts["tie_word_embeddings"] = False
    for key, value in {**again, **caps, **parts, "weight_mode": "single"}.items():
        config.choice(key, value)
    config.skip(*CHANGES_NOTHING)


def divided(x: Register, w: Weights, name: str, c: Sizes) -> Register:
    """Divide by the root mean square, with a gain and perhaps a bias."""
    return norm(x, *gain_and_bias(w, name, x.size, c), eps=c.norm_eps)


def gain_and_bias(w: Weights, name: str, n: int, c: Sizes) -> tuple[Tensor, Tensor | None]:
    """Take what a norm has."""
    return w.get(f"{name}.weight", (n,)), w.get(f"{name}.bias", (n,)) if c.bias else None


def mlstm(h: Register, w: Weights, c: Sizes) -> Register:
    """Record an mLSTM, whose gates' inputs are c·tanh(x/c)."""
    sizes = {"q": c.keys, "k": c.keys, "v": c.values, "ogate_preact": c.values}
    q, k, v, gate = (heads(dense(h, w, name, n, bias=c.bias), c.heads) for name, n in sizes.items())
    inputs = (dense(h, w, name, c.heads, bias=True, exact=True) for name in ("igate_preact", "fgate_preact"))
    enter, keep = (heads(apply(x * (1 / c.cap), "tanh") * c.cap, c.heads) for x in inputs)
    log_decay, state = apply(keep, "log_sigmoid"), h.record.state("LinearState")
    o = linear(q * q.width**-0.5, k, v, state, log_decay=log_decay, k_scale=enter, at_least_one=True, eps=c.eps)
    o = norm(o, *gain_and_bias(w, "multihead_norm", c.values, c), eps=c.norm_eps, kind="layer")
    return dense(o * apply(gate, "sigmoid"), w, "out_proj", h.size, bias=c.bias)
