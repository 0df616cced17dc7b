"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456), from the weights of rwkv.cpp's and BlinkDL's names or from fla's folders.

All of it is written for the names of the former: `blocks.0.att.receptance.weight`. fla's are translated, layer by layer.
"""

from collections.abc import Iterable

import torch

from tarnn.errors import UserError
from tarnn.families.config import Config
from tarnn.families.rwkv7_mixing import NORM_EPS, channel_mixing, time_mixing
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder, Register, norm

EPS = 1e-5  # of norms of all channels
LOW_RANK = {"w": "decay", "a": "a", "g": "gate", "v": "v"}  # fla's names


def program(config: Config, weights: Weights) -> Program:
    """Write the program of a folder of fla. That it names code of its own (auto_map) changes nothing: none is run.

    Where the weights have the names of rwkv.cpp, they say all sizes, and the config need not.
    """
    if "emb.weight" in weights:
        config.check_all_taken()
        return program_of_weights(weights)
    hidden, vocab, eps = config.size("hidden_size"), config.size("vocab_size"), config.number("norm_eps", EPS, least=0)
    num_heads, layers = heads_of(config, hidden), config.size("num_hidden_layers")
    ratio = config.number("hidden_ratio", 4.0, least=0.01, most=1e3)
    inner = config.size("intermediate_size", -(-int(hidden * ratio) // 32) * 32)
    bias, first = config.flag("norm_bias", True), config.flag("norm_first", True)
    for name in ("hidden_act", "attn", "tie_word_embeddings"):
        config.choice(name, {"hidden_act": "sqrelu", "attn": None, "tie_word_embeddings": False}[name])
    if (values := config.get("value_dim", hidden)) not in (hidden, [hidden] * layers):
        config.refuse("value_dim", values, f"{hidden}, as hidden_size,")
    ranks = {name: config.size(f"{key}_low_rank_dim", None) for name, key in LOW_RANK.items()}
    config.skip("auto_map", "attn_mode", "fuse_norm", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp")
    record = Recorder(model_type="rwkv7", vocab_size=vocab)
    x = record.embed(weights.get("model.embeddings.weight", (vocab, hidden)))
    blocks = (translated(weights.under(f"model.layers.{i}."), i, hidden, ranks) for i in range(layers))
    if first:
        x = normed(x, weights.under("model.layers.0.pre_norm."), eps, bias)
    x = normed(
        all_layers(x, blocks, num_heads, inner, eps, hidden // num_heads * eps, bias),
        weights.under("model.norm."),
        eps,
        bias,
    )
    done = record.head(x, weights.get("lm_head.weight", (vocab, hidden)))
    config.check_all_taken()
    weights.check_all_taken()
    return done


def program_of_weights(weights: Weights) -> Program:
    """Write the program of weights with the names of rwkv.cpp, which say all sizes.

    Raises UserError for weights of another model.
    """
    if "blocks.0.att.time_decay" in weights:
        raise UserError(f"{weights.place} has the weights of RWKV-5 or RWKV-6; expected RWKV-7.")
    (vocab, hidden), (num_heads, _) = matrix(weights, "emb.weight"), matrix(weights, "blocks.0.att.r_k")
    inner, _ = matrix(weights, "blocks.0.ffn.key.weight")
    layers = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    record = Recorder(model_type="rwkv7", vocab_size=vocab)
    x = normed(record.embed(weights["emb.weight"]), weights.under("blocks.0.ln0."), EPS)
    x = all_layers(x, (weights.under(f"blocks.{i}.") for i in range(layers)), num_heads, inner, EPS, NORM_EPS)
    done = record.head(normed(x, weights.under("ln_out."), EPS), weights.get("head.weight", (vocab, hidden)))
    weights.check_all_taken()
    return done


def all_layers(
    x: Register, blocks: Iterable[Weights], num_heads: int, inner: int, eps: float, head_eps: float, bias: bool = True
) -> Register:
    """Write time mixing and channel mixing, each f in x + f(norm x). head_eps: of the norm of a head; eps: of all others."""
    values: Register | None = None
    for w in blocks:
        state = x.record.state("RwkvState")
        h = normed(x, w.under("ln1."), eps, bias)
        h, own = time_mixing(h, w.under("att."), num_heads, state, "attention_input", values, head_eps)
        values = own if values is None else values
        x = x + h
        x = x + channel_mixing(normed(x, w.under("ln2."), eps, bias), w.under("ffn."), inner, state)
    return x


def normed(x: Register, w: Weights, eps: float, bias: bool = True) -> Register:
    """Write a LayerNorm of all channels."""
    return norm(x, w.get("weight", (x.size,)), w.get("bias", (x.size,)) if bias else None, eps=eps, kind="layer")


def matrix(weights: Weights, name: str) -> tuple[int, int]:
    """Return a matrix's shape. Raises UserError for a tensor that is none."""
    shape = weights.shape(name)
    if len(shape) != 2 or not all(shape):
        raise UserError(f"{weights.place} has {name} of shape {shape}; expected a matrix, as RWKV-7 has it there.")
    return shape[0], shape[1]


def heads_of(config: Config, hidden: int) -> int:
    """Return the number of heads, as fla has it: by their width, or by number where that is null."""
    if config.get("head_dim", 64 if config.get("num_heads") is None else None) is None:
        number = config.size("num_heads")
    else:
        number, rest = divmod(hidden, width := config.size("head_dim", 64))
        if rest:
            config.refuse("head_dim", width, f"a divisor of hidden_size ({hidden})")
    if number == 0 or hidden % number:
        config.refuse("num_heads", number, f"a divisor of hidden_size ({hidden})")
    return number


def translated(w: Weights, layer: int, hidden: int, ranks: dict[str, int | None]) -> Weights:
    """Return a layer of fla under the names of rwkv.cpp. ranks: of products of low rank; None: as the tensors have them."""
    vector = lambda name: w.get(f"attn.{name}", (hidden,)).view(1, 1, hidden)  # noqa: E731
    mixtures = torch.stack([w.get(f"attn.x_{name}", (1, 1, hidden))[0] for name in "rwkvag"])
    named = {"att.x_rwkvag": mixtures, "att.k_k": vector("k_k"), "att.k_a": vector("k_a"), "att.r_k": w["attn.r_k"]}
    for name in "wagv" if layer else "wag":
        down, up = (f"attn.{name}_lora.lora.{i}.weight" for i in (0, 2))
        rank = w.shape(down)[0] if ranks[name] is None else int(ranks[name] or 0)
        named |= {f"att.{name}1": w.get(down, (rank, hidden)), f"att.{name}2": w.get(up, (hidden, rank))}
        if name != "g":
            named[f"att.{name}0"] = vector(f"{name}_lora.lora.2.bias")
    matrices = {"r_proj": "receptance", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    others = {f"attn.{theirs}.weight": f"att.{ours}.weight" for theirs, ours in matrices.items()}
    others |= {f"ffn.{name}.weight": f"ffn.{name}.weight" for name in ("key", "value")}
    for theirs, ours in {"attn_norm": "ln1", "ffn_norm": "ln2", "attn.g_norm": "att.ln_x"}.items():
        others |= {f"{theirs}.{x}": f"{ours}.{x}" for x in ("weight", "bias") if f"{theirs}.{x}" in w}
    named |= {ours: w[theirs] for theirs, ours in others.items()}
    return Weights.of(named | {"ffn.x_k": w.get("ffn.x_k", (hidden,)).view(1, 1, hidden)}, f"{w.place}, layer {layer},")
