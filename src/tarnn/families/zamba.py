"""Zamba (Glorioso et al. 2024, arXiv 2405.16712): Mamba's mixers with heads, some behind one block with softmax that all share.

The block reads the stream and the embeddings side by side; what it gives is added to what the mixer reads, and to nothing
else. A mixer's heads each have their own products for Δ, B and C. Rows of `in_proj` are for x and for its gate in turns.
"""

from dataclasses import dataclass

from tarnn.families.config import Config
from tarnn.families.jamba import sizes_of, turns
from tarnn.families.mamba import MambaSizes
from tarnn.families.parts import Heads, attend, dense, embed, head, kinds_of_layers, qkv, rms, swiglu
from tarnn.families.weights import Weights
from tarnn.families.zamba2 import FUNCTIONS, KINDS, check_shared
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, concat, filter, head_product, heads, product
from tarnn.program.scans import selective_scan

CHANGES_NOTHING = (
    *("num_logits_to_keep", "time_step_floor", "time_step_max", "time_step_min"),
    *("use_associative_scan", "use_mamba_kernels"),
)


@dataclass(frozen=True)
class BlockSizes:
    """Numbers of the shared block."""

    heads: Heads
    eps: float
    inner: int
    function: str


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden, layers = config.size("hidden_size"), config.size("num_hidden_layers", 76)
    eps = config.number("rms_norm_eps", 1e-5, least=0)
    c, n, block = sizes_of(config, hidden), config.size("n_mamba_heads", 2), shared_block_of(config, hidden, eps)
    if c.inner % n:
        config.refuse("n_mamba_heads", n, f"a divisor of mamba_expand · hidden_size ({c.inner})")
    config.choice("hidden_mamba_act", "silu")
    kinds = kinds_of_layers(config, KINDS, default_kinds(config, layers), layers)
    tied = config.flag("tie_word_embeddings", True)  # for transformers these are all ties, those of blocks too
    x = embeddings = embed(config, weights, hidden)
    for i, kind in enumerate(kinds):
        w, read = weights.under(f"model.layers.{i}."), x
        if kind == "hybrid":
            home = weights.under(f"model.layers.{kinds.index(kind) if tied else i}.shared_transf.")
            check_shared(w.under("shared_transf."), home)
            read = x + dense(shared_block(x, embeddings, home, block), w, "linear", hidden)
            w = w.under("mamba_decoder.")
        x = x + mixer(rms(read, w, "input_layernorm", eps), w.under("mamba."), c, n)
    return head(rms(x, weights, "model.final_layernorm", eps), config, weights, tied=tied, harmless=CHANGES_NOTHING)


def default_kinds(config: Config, layers: int) -> list[str]:
    """Return the kinds of the layers of a config that does not list them."""
    hybrids = turns(config, "attn_layer", max(layers - 3, 0), 6, 4)
    first = ["mamba", "mamba", "hybrid"][:layers]
    return first + ["hybrid" if i in hybrids else "mamba" for i in range(layers - 3)]


def shared_block_of(config: Config, hidden: int, eps: float) -> BlockSizes:
    """Read the numbers of the shared block."""
    n = config.size("num_attention_heads")
    keys, width = config.size("num_key_value_heads", 16), config.size("attention_head_dim", max(2 * hidden // n, 1))
    if n % keys:
        config.refuse("num_key_value_heads", keys, f"a divisor of num_attention_heads ({n})")
    config.choice("attention_hidden_size", 2 * hidden)
    config.choice("head_dim", width)
    function = FUNCTIONS[config.choice("hidden_act", *FUNCTIONS)]
    return BlockSizes(Heads(n, keys, width), eps, config.size("intermediate_size"), function)


def shared_block(x: Register, embeddings: Register, w: Weights, c: BlockSizes) -> Register:
    """Write softmax and an MLP, one behind the other."""
    both, part = rms(concat(x, embeddings), w, "input_layernorm", c.eps), w.under("self_attn.")
    o = attend(*qkv(both, part, c.heads), part, scale=(c.heads.width / 2) ** -0.5)
    h = rms(dense(o, part, "o_proj", x.size), w, "pre_ff_layernorm", c.eps)
    return swiglu(h, w.under("feed_forward."), c.inner, function=c.function)


def mixer(h: Register, w: Weights, c: MambaSizes, n: int) -> Register:
    """Write a mixer of n heads: Mamba's, but for products that each head has for itself."""
    state, width = h.record.state("FilteredScanState"), c.inner // n
    rows = w.get("in_proj.weight", (2 * c.inner, h.size)).view(c.inner, 2, h.size).unbind(1)
    biases = w.get("in_proj.bias", (2 * c.inner,)).view(c.inner, 2).unbind(1) if c.bias else (None, None)
    x, z = (product(h, *some) for some in zip(rows, biases, strict=True))
    taps = w.get("conv1d.weight", (c.inner, 1, c.taps))[:, 0]
    u = heads(filter(x, taps, state, w.get("conv1d.bias", (c.inner,)) if c.filter_bias else None), n)
    parts = w.get("x_proj_weight", (n, c.rank + 2 * c.state, width)).split([c.rank, c.state, c.state], 1)
    low, B, C = (head_product(u, part) for part in parts)
    wide, bias = w.get("dt_proj_weight", (n, width, c.rank)), w.get("dt_proj_bias", (n, width))
    dt = apply(head_product(low, wide, bias), "softplus")
    A = w.get("A_log", (n, width, c.state)).double().exp().neg().float()
    y = selective_scan(u, dt, B, C, A.flatten(0, 1), state) + u * w.get("D", (n, width))
    return dense(y * apply(z, "silu"), w, "out_proj", h.size, bias=c.bias)
