"""Parts that many families are built of, written into a program with the names that transformers gives their tensors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tarnn.families.config import REQUIRED, Config
from tarnn.families.converted import Converted
from tarnn.families.weights import Weights
from tarnn.program.instructions import Program
from tarnn.program.recording import Recorder, Register, apply, heads, norm, product, rotate, softmax

EMBEDDINGS = "model.embed_tokens.weight"
GATED = ("gate_proj", "up_proj", "down_proj")
LFM = ("w1", "w3", "w2")  # as Mixtral has them, too


@dataclass(frozen=True)
class Heads:
    """Sizes of softmax attention; several query heads may share a key head."""

    queries: int
    keys: int
    width: int

    @classmethod
    def of(cls, config: Config, hidden: int, width: int | None = None) -> "Heads":
        """Read them. width: the family's default; None: as many as make up the hidden size."""
        queries = config.size("num_attention_heads")
        keys = config.size("num_key_value_heads", queries)
        if queries % keys:
            config.refuse("num_key_value_heads", keys, f"a divisor of num_attention_heads ({queries})")
        if hidden % queries and width is None and config.get("head_dim") is None:
            config.refuse("num_attention_heads", queries, f"a divisor of hidden_size ({hidden})")
        return cls(queries, keys, config.size("head_dim", width or hidden // queries))


def embed(
    config: Config,
    weights: Weights,
    hidden: int,
    name: str = EMBEDDINGS,
    *,
    scale: float = 1.0,
    limit: int | None = None,
) -> Register:
    """Begin the program of a model of tokens, which may have been converted (`families.converted`), with their embeddings.

    limit: positions; None: any number.
    """
    tokens = config.size("vocab_size")
    record = Recorder(limit, converted=Converted.of(config), model_type=config.model_type, vocab_size=tokens)
    return record.embed(weights.get(name, (tokens, hidden)), scale=scale)


def dense(x: Register, w: Weights, name: str, outputs: int, *, bias: bool = False, **options: Any) -> Register:
    """Multiply by `name.weight`, and add `name.bias` if there is to be one. options: of `product`."""
    b = w.get(f"{name}.bias", (outputs,)) if bias else None
    return product(x, w.get(f"{name}.weight", (outputs, x.size)), b, **options)


def rms(x: Register, w: Weights, name: str, eps: float, *, from_one: bool = False, scale: float = 1.0) -> Register:
    """Divide each head by its root mean square. from_one: what is multiplied with is 1 + `name.weight`. scale: of outputs."""
    gain = w.get(f"{name}.weight", (x.width,))
    gain = 1 + gain.float() if from_one else gain
    return norm(x, gain if scale == 1 else gain.float() * scale, eps=eps)


def times(x: Register, number: float) -> Register:
    """Multiply by a number of the config, which most models leave at 1."""
    return x if number == 1 else x * number


def qkv(x: Register, w: Weights, sizes: Heads, *, bias: bool = False) -> tuple[Register, Register, Register]:
    """Compute queries, keys and values."""
    names = (("q", sizes.queries), ("k", sizes.keys), ("v", sizes.keys))
    q, k, v = (heads(dense(x, w, f"{name}_proj", n * sizes.width, bias=bias), n) for name, n in names)
    return q, k, v


def attention(
    x: Register,
    w: Weights,
    sizes: Heads,
    frequencies: Float[Tensor, " p"] | None = None,
    *,
    bias: bool = False,
    scale: float | None = None,
) -> Register:
    """Compute softmax attention and its projections. frequencies, scale: as in `attend`."""
    o = attend(*qkv(x, w, sizes, bias=bias), w, frequencies, scale=scale)
    return dense(o, w, "o_proj", x.size, bias=bias)


def swiglu(
    x: Register,
    w: Weights,
    inner: int,
    *,
    bias: bool = False,
    function: str = "silu",
    names: tuple[str, str, str] = GATED,
) -> Register:
    """Compute down(f(gate x) ⊙ up x). names: of gate, up and down."""
    gate, up = (dense(x, w, name, inner, bias=bias) for name in names[:2])
    return dense(apply(gate, function) * up, w, names[2], x.size, bias=bias)


def kinds_of_layers(
    config: Config, names: Mapping[str, str], default: Sequence[str] | None, length: int | None = None
) -> list[str]:
    """Return the kind of each layer, as `layer_types` or `layers_block_type` lists them. names: their names → ours.

    length: how many there must be; None: any number. Raises UserError where both lists are there and differ.
    """
    lists = [(key, config.get(key)) for key in ("layer_types", "layers_block_type")]
    listed = [(key, x) for key, x in lists if x is not None] or [("layer_types", default)]
    kinds = []
    for key, some in listed:
        many = len(some) if isinstance(some, list) and length is None else length
        chosen = config.choices(key, *names, default=default or REQUIRED, length=many or 0)
        kinds.append([names[x] for x in chosen])
    if kinds[0] != kinds[-1]:
        config.refuse("layers_block_type", listed[-1][1], "as layer_types, where both are there,")
    return kinds[0]


def attend(
    q: Register,
    k: Register,
    v: Register,
    w: Weights,
    frequencies: Float[Tensor, " p"] | None = None,
    *,
    scale: float | None = None,
) -> Register:
    """Attend by softmax over all tokens so far; q and k rotated first, if there are frequencies.

    In a converted model: as its config says. w: the weights of the layer's attention. scale: of products; None: 1/√d.
    """
    if frequencies is not None:
        q, k = rotate(q, frequencies), rotate(k, frequencies)
    scale = q.width**-0.5 if scale is None else scale
    if (converted := q.record.converted) is not None:
        return converted.attend(q, k, v, w.under("tarnn."), scale)
    return softmax(q, k, v, q.record.state("KVCache"), scale=scale)


def head(
    x: Register,
    config: Config,
    weights: Weights,
    embeddings: str = EMBEDDINGS,
    *,
    tied: bool | None = None,
    softcap: float = 0.0,
    harmless: Collection[str] = (),
    may_leave: Sequence[str] = (),
) -> Program:
    """End the program with `lm_head`, or with the embeddings if they are tied; None: if the config says so.

    softcap: of the logits; 0: none. Keys and tensors that nobody took are refused then, but for patterns of `harmless` keys, and
    of names that the family `may_leave`.
    """
    shape = config.size("vocab_size"), x.size
    tied = config.flag("tie_word_embeddings", False) if tied is None else tied
    weight = weights.tied("lm_head.weight", embeddings, shape) if tied else weights.get("lm_head.weight", shape)
    done = x.record.head(x, weight, softcap=softcap)
    config.check_all_taken(harmless)
    weights.check_all_taken(*may_leave)
    return done


def split_heads(x: Register, *shapes: tuple[int, int]) -> tuple[Register, ...]:
    """View consecutive channels as so many heads of such a width each."""
    parts = x.split(*(n * d for n, d in shapes))
    return tuple(heads(part, n) for part, (n, _) in zip(parts, shapes, strict=True))
