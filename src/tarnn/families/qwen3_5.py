"""Qwen3.5: layers with the gated delta rule, and softmax attention with gated outputs in one of four (text model alone).

Norms of blocks, q and k multiply with 1 + w; the delta rule's with w. A quarter of a head is rotated. Folders with images
hold the text model under another name; their other tensors are left. Those of `mtp.`, which make drafts, `qwen3_5_mtp` reads.
"""

from collections.abc import Callable

from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.gated_delta import DeltaSizes, Gates, gated_delta
from tarnn.families.parts import Heads, attend, dense, embed, head, rms, swiglu
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, heads, product

LEFT = ("mtp.*", "model.visual.*")
KINDS = ("linear_attention", "full_attention")
Projections = Callable[[Register, Weights, DeltaSizes], tuple[Register, Gates]]
Mlp = Callable[[int, Register, Weights], Register]


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    text, prefix = text_of(config, weights)
    text.skip("mlp_only_layers")
    return delta_hybrid(text, weights, prefix, projections, dense_mlp(text))


def text_of(config: Config, weights: Weights) -> tuple[Config, str]:
    """Return the config of the text model, and how the names of its tensors begin."""
    text = config.text()
    text.choice("attn_output_gate", True)
    text.skip("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    of_images = "model.language_model.embed_tokens.weight" in weights
    return text, "model.language_model." if of_images else "model."


def dense_mlp(config: Config) -> Mlp:
    """Return what computes a layer's SwiGLU."""
    inner = config.size("intermediate_size")
    return lambda layer, x, w: swiglu(x, w, inner)


def projections(x: Register, w: Weights, sizes: DeltaSizes) -> tuple[Register, Gates]:
    """Record q, k and v of a layer, and return the rows that gate it."""
    n, hidden = sizes.values, x.size
    qkv = dense(x, w, "in_proj_qkv", sizes.channels)
    z = w.get("in_proj_z.weight", (sizes.all_values, hidden))
    return qkv, Gates(z, w.get("in_proj_b.weight", (n, hidden)), w.get("in_proj_a.weight", (n, hidden)))


def delta_hybrid(config: Config, weights: Weights, prefix: str, project: Projections, mlp: Mlp) -> Program:
    """Write the program of a model of both kinds of layers. project: where q, k, v and the gates lie in its tensors.

    mlp: what computes the second half of a layer, of its number, a register and its tensors.
    """
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    config.choice("hidden_act", "silu")
    sizes, attention_heads = DeltaSizes.of(config, 16, 32, 128, 128), Heads.of(config, hidden, 256)
    eps = config.number("rms_norm_eps", 1e-6, least=0)
    frequencies = rope_of(config, attention_heads.width, partial=0.25).frequencies()
    bias = config.flag("attention_bias", False)
    name = f"{prefix}embed_tokens.weight"
    x = embed(config, weights, hidden, name)
    for i, kind in enumerate(layer_kinds(config, layers)):
        w = weights.under(f"{prefix}layers.{i}.")
        h = rms(x, w, "input_layernorm", eps, from_one=True)
        if kind == "linear_attention":
            part, state = w.under("linear_attn."), x.record.state("GatedDeltaState")
            o = gated_delta(h, *project(h, part, sizes), part, sizes, state, eps=eps)
            x = x + dense(o, part, "out_proj", hidden)
        else:
            o = gated_softmax(h, w.under("self_attn."), attention_heads, frequencies, eps, bias)
            x = x + dense(o, w.under("self_attn."), "o_proj", hidden, bias=bias)
        h = rms(x, w, "post_attention_layernorm", eps, from_one=True)
        x = x + mlp(i, h, w.under("mlp."))
    return head(rms(x, weights.under(prefix), "norm", eps, from_one=True), config, weights, name, may_leave=LEFT)


def gated_softmax(x: Register, w: Weights, sizes: Heads, frequencies: Tensor, eps: float, bias: bool) -> Register:
    """Attend by softmax; outputs times σ of a gate, which `q_proj` has behind the queries of each head."""
    h, d = sizes.queries, sizes.width
    rows = w.get("q_proj.weight", (2 * h * d, x.size)).unflatten(0, (h, 2, d))
    biases = w.get("q_proj.bias", (2 * h * d,)).unflatten(0, (h, 2, d)) if bias else None
    q, gate = (product(x, rows[:, i], None if biases is None else biases[:, i].flatten()) for i in (0, 1))
    q = rms(heads(q, h), w, "q_norm", eps, from_one=True)
    k = rms(heads(dense(x, w, "k_proj", sizes.keys * d, bias=bias), sizes.keys), w, "k_norm", eps, from_one=True)
    v = heads(dense(x, w, "v_proj", sizes.keys * d, bias=bias), sizes.keys)
    return attend(q, k, v, w, frequencies) * heads(apply(gate, "sigmoid"), h)


def layer_kinds(config: Config, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer: as listed, or softmax in each `full_attention_interval`-th."""
    interval = config.size("full_attention_interval", 4)
    default = [KINDS[(i + 1) % interval == 0] for i in range(layers)]
    return config.choices("layer_types", *KINDS, default=default, length=layers)
