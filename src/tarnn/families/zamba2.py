"""Zamba2 (Zyphra 2024, arXiv 2411.15242): Mamba-2's mixers, some of them behind a block with softmax that several layers share.

A block reads the stream and the embeddings side by side; what it gives is added to what the mixer reads, and to nothing
else. Few blocks take turns; each of their layers adds products of low rank to the shared ones. Δ is at least
`time_step_min`, in prompts and in steps.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import Config
from tarnn.families.mamba2 import Mamba2Sizes, mixer
from tarnn.families.parts import Heads, attend, dense, embed, head, kinds_of_layers, qkv, rms
from tarnn.families.rope import rope_of
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Register, apply, concat, product

KINDS = {"mamba": "mixer", "linear_attention": "mixer", "hybrid": "hybrid"}
FUNCTIONS = {"gelu": "gelu", "silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
NORM_EPS = 1e-5  # of the mixers' norms, whatever the config says
CHANGES_NOTHING = (
    *("chunk_size", "num_logits_to_keep", "time_step_floor", "time_step_max", "use_conv_bias", "use_long_context"),
    *("use_mamba_kernels", "use_mem_eff_path"),
)


@dataclass(frozen=True)
class SharedBlock:
    """Numbers that all shared blocks have. rank: of what each layer adds; adapted: to the products of softmax, too."""

    heads: Heads
    eps: float
    frequencies: Float[Tensor, " p"] | None
    inner: int
    function: str
    bias: bool
    rank: int
    adapted: bool

    @classmethod
    def of(cls, config: Config, hidden: int, eps: float) -> "SharedBlock":
        queries = config.size("num_attention_heads")
        keys = config.size("num_key_value_heads", queries)
        adapted = config.flag("use_shared_attention_adapter", False)
        if 2 * hidden % queries or queries % keys or (adapted and queries != keys):
            wanted = f"a divisor of {2 * hidden}, and num_key_value_heads ({keys}) one of it"
            config.refuse("num_attention_heads", queries, wanted)
        sizes = Heads(queries, keys, 2 * hidden // queries)
        rotated = config.flag("use_mem_rope", False)
        if not rotated:
            config.skip("rope_theta", "rope_scaling", "rope_parameters")
        return cls(
            sizes,
            eps,
            frequencies=rope_of(config, sizes.width).frequencies() if rotated else None,
            inner=config.size("intermediate_size", 4 * hidden),
            function=FUNCTIONS[config.choice("hidden_act", *FUNCTIONS)],
            bias=config.flag("add_bias_linear", False),
            rank=config.size("adapter_rank", 128),
            adapted=adapted,
        )


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder."""
    hidden = config.size("hidden_size")
    eps = config.number("rms_norm_eps", 1e-5, least=0)
    c, block = mixer_sizes(config, hidden), SharedBlock.of(config, hidden, eps)
    kinds = kinds_of_layers(config, KINDS, default_kinds(), config.size("num_hidden_layers", 54))
    hybrids, blocks = [i for i, kind in enumerate(kinds) if kind == "hybrid"], config.size("num_mem_blocks", 1)
    tied = config.flag("tie_word_embeddings", True)  # for transformers these are all ties, those of blocks too
    check_repeated(config, block, c, hybrids)
    x = embeddings = embed(config, weights, hidden)
    for i, kind in enumerate(kinds):
        w, read = weights.under(f"model.layers.{i}."), x
        if kind == "hybrid":
            turn = hybrids.index(i)
            first = hybrids[turn % blocks] if tied else i
            home = weights.under(f"model.layers.{first}.shared_transformer.")
            if first != i:
                check_shared(w.under("shared_transformer."), home)
            elif not tied:  # there are adapters of other layers, which nothing reads
                home.skip(*(x for x in home if "_adapter_list." in x and f"_adapter_list.{turn}." not in x))
            read = x + dense(shared_block(x, embeddings, home, block, turn), w, "linear", hidden)
            w = w.under("mamba_decoder.")
        x = x + mixer(rms(read, w, "input_layernorm", eps), w.under("mamba."), c)
    return head(rms(x, weights, "model.final_layernorm", eps), config, weights, tied=tied, harmless=CHANGES_NOTHING)


def shared_block(x: Register, embeddings: Register, w: Weights, c: SharedBlock, turn: int) -> Register:
    """Write softmax and an MLP, one behind the other. turn: which of the layers with blocks this is."""
    both, part = rms(concat(x, embeddings), w, "input_layernorm", c.eps), w.under("self_attn.")
    scale = (c.heads.width / 2) ** -0.5
    o = attend(*queries_keys_values(both, part, c, turn), part, c.frequencies, scale=scale)
    h = rms(dense(o, part, "o_proj", x.size), w, "pre_ff_layernorm", c.eps)
    part, shape = w.under("feed_forward."), (2 * c.inner, x.size)
    rows = part.get("gate_up_proj.weight", shape).split(c.inner)
    biases = part.get("gate_up_proj.bias", shape[:1]).split(c.inner) if c.bias else (None, None)
    shared = [product(h, *some) for some in zip(rows, biases, strict=True)]
    narrow, wide = adapter(h, part, f"gate_up_proj_adapter_list.{turn}.", c.rank, 2 * c.inner)
    gate, up = (y + product(narrow, some) for y, some in zip(shared, wide.split(c.inner), strict=True))
    return dense(apply(gate, c.function) * up, part, "down_proj", x.size, bias=c.bias)


def queries_keys_values(x: Register, w: Weights, c: SharedBlock, turn: int) -> tuple[Register, Register, Register]:
    """Compute them; all products of x first, which are one phase then."""
    q, k, v = qkv(x, w, c.heads)
    if not c.adapted:
        return q, k, v
    n = q.size
    pairs = [adapter(x, w, f"linear_{name}_adapter_list.{turn}.", c.rank, n) for name in "qkv"]
    q, k, v = (y + product(*pair) for y, pair in zip((q, k, v), pairs, strict=True))
    return q, k, v


def adapter(x: Register, w: Weights, name: str, rank: int, outputs: int) -> tuple[Register, Tensor]:
    """Return a product of low rank in two: the first one's outputs, and the second one's weights."""
    return product(x, w.get(f"{name}0.weight", (rank, x.size))), w.get(f"{name}1.weight", (outputs, rank))


def mixer_sizes(config: Config, hidden: int) -> Mamba2Sizes:
    """Return the sizes of the mixers."""
    n, inner = config.size("n_mamba_heads", 8), config.size("mamba_expand", 2) * hidden
    bias = config.flag("add_bias_linear", False)
    if inner % n:
        config.refuse("n_mamba_heads", n, f"a divisor of mamba_expand · hidden_size ({inner})")
    keys = ("mamba_ngroups", 1), ("mamba_d_state", 64), "mamba_d_conv"
    return Mamba2Sizes.read(config, n, inner // n, *keys, NORM_EPS, bias, True).with_least_step(config)


def default_kinds() -> list[str]:
    """Return the kinds of the 54 layers of Zamba2-2.7B."""
    hybrids = (*range(6, 43, 6), 47, 51)
    return ["hybrid" if i in hybrids else "mamba" for i in range(54)]


def check_shared(w: Weights, home: Weights) -> None:
    """Refuse a layer that has other numbers for a shared block than the block's first layer. Most have none."""
    for name in w:
        home.same(name, w)


def check_repeated(config: Config, block: SharedBlock, c: Mamba2Sizes, hybrids: list[int]) -> None:
    """Refuse other values of keys that say again what others say."""
    n, width = block.heads.queries, block.heads.width
    again: dict[str, object] = {
        "attention_hidden_size": n * width,
        "attention_head_dim": width,
        "head_dim": width,
        "kv_channels": width // 2,
    }
    again |= {
        "num_query_groups": n,
        "ffn_hidden_size": block.inner,
        "mamba_headdim": c.width,
        "hybrid_layer_ids": hybrids,
    }
    for name, value in again.items():
        config.choice(name, value)
