"""Records of a plan: each says what modules of one kind compute, with their own weights and numbers."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tarnn.decoding.hybrid import Hybrid
from tarnn.kernels.cpu.products import Block
from tarnn.ops import KVCache, LinearState, NoState, State

Shapes = Iterator[tuple[Any, ...]]  # each tensor, and what its shape may be


class Product(NamedTuple):
    """y = W x + bias, W (outputs, inputs)."""

    weight: Tensor
    bias: Tensor | None = None

    def shapes(self, outputs: int, inputs: int) -> Shapes:
        yield self.weight, (outputs, inputs)
        yield self.bias, (outputs,)

    def split(self, widths: Sequence[int]) -> list["Product"]:
        """Several products of the same input, which are one here."""
        biases = [None] * len(widths) if self.bias is None else self.bias.split(list(widths))
        return [Product(*x) for x in zip(self.weight.split(list(widths)), biases, strict=True)]

    def by_head(self, num_heads: int) -> tuple[Tensor, Tensor | None]:
        """W (heads, outputs of each, inputs) and the bias (heads, outputs of each)."""
        weight = self.weight.unflatten(0, (num_heads, -1))
        return weight, None if self.bias is None else self.bias.unflatten(0, (num_heads, -1))


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm if `centred`; eps is added to the mean square (variance)."""

    gain: Tensor
    bias: Tensor | None = None
    eps: float = 1e-6
    centred: bool = False


class Shift(NamedTuple):
    """(x − centre)·stretch, with weight·x + constant as its log-weight: (1 or g, d) each, the constant (1 or g,)."""

    centre: Tensor
    stretch: Tensor
    weight: Tensor
    constant: Tensor


class Features(NamedTuple):
    """How φ(x) is made: x ← (x − centre)·stretch, then u = Ω x + bias − square·|x|² + offset and φ = gain·function(u) + shift.

    function: a name of `program.feature_functions.FUNCTIONS`. number: of exp, the least that its logarithm may be; of dpfp, ν; of
    cosformer, the angle per position. parts: of pairs, the factors of 1, x, x², x_i·x_j, x, 1.
    """

    function: str
    omega: Tensor | None = None  # (1 or g, m, d)
    bias: Tensor | None = None  # (1 or g, m)
    square: float = 0.0
    offset: float = 0.0
    gain: float = 1.0
    shift: float = 0.0
    number: float = float("-inf")
    parts: tuple[float, ...] = ()
    queries: Shift | None = None
    keys: Shift | None = None

    def width(self, d: int) -> int:
        """The number of features of a head of d channels."""
        m = d if self.omega is None else self.omega.shape[1]
        leads, line, _, _, behind, ends = (bool(x) for x in self.parts or (0,) * 6)
        of_pairs = leads + (line + behind) * d + d * (d + 1) // 2 + ends
        widths = {"waves": 2 * m, "halves": 2 * m, "cosformer": 2 * m, "pairs": of_pairs}
        return int(2 * d * self.number) if self.function == "dpfp" else widths.get(self.function, m)

    def shapes(self, g: int, d: int) -> Shapes:
        if self.omega is not None:
            m = self.omega.shape[1]
            yield self.omega, (1, m, d), (g, m, d)
            yield self.bias, (1, m), (g, m)
        for shift in filter(None, (self.queries, self.keys)):
            for tensor in shift[:3]:
                yield tensor, (1, d), (g, d)
            yield shift.constant, (1,), (g,)


class Decay(NamedTuple):
    """How the state fades: by log_decay (g,), the same for all tokens, by −softplus(rows x), or by log σ(up rows x) / 16."""

    kind: str = "none"
    log_decay: Tensor | None = None
    rows: Product | None = None
    up: Product | None = None

    def shapes(self, g: int, num_features: int, hidden: int) -> Shapes:
        yield self.log_decay, (g,)
        if self.rows is not None:
            rank = g if self.up is None else len(self.rows.weight)
            yield from self.rows.shapes(rank, hidden)
            if self.up is not None:
                yield from self.up.shapes(g * num_features, rank)


class Attention(NamedTuple):
    """One layer's attention of h query heads and g key heads of d channels."""

    kind: str  # linear | softmax | none | hybrid
    heads: tuple[int, int, int]  # h, g, d
    inputs: tuple[Product, ...]  # queries, keys and values; of "none" values alone
    output: Product
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    o_norm: Norm | None = None
    frequencies: Tensor | None = None  # of the pairs that rotary positions rotate
    rotates_features: bool = False
    features: Features | None = None
    num_features: int = 0
    log_scaled: bool = False  # the state has a maximum
    normalize: bool = True
    decay: Decay = Decay()
    hybrid: Hybrid | None = None
    rotary_dim: int | None = None  # of softmax: so many channels of a head, the first ones, are rotated; None: all
    gate: Product | None = None  # of softmax: the outputs are multiplied with its σ
    whole_norms: bool = False  # of softmax: q_norm and k_norm are of all heads together

    @property
    def all_features(self) -> list[Features]:
        """Feature maps of queries and keys: one if shared, otherwise [queries, keys]."""
        return [x for x in (self.features, self.hybrid and self.hybrid.keys) if x is not None]

    def shapes(self, hidden: int) -> Shapes:
        h, g, d = self.heads
        for product, heads in zip(self.inputs, (h, g, g)[-len(self.inputs) :], strict=True):
            yield from product.shapes(heads * d, hidden)
        yield from self.output.shapes(hidden, h * d)
        if self.gate is not None:
            yield from self.gate.shapes(h * d, hidden)
        normed = (h * d, g * d, d) if self.whole_norms else (d, d, d)
        for norm, width in zip((self.q_norm, self.k_norm, self.o_norm), normed, strict=True):
            yield None if norm is None else norm.gain, (width,)
        yield self.frequencies, ((self.num_features if self.rotates_features else self.rotary_dim or d) // 2,)
        yield from self.decay.shapes(g, self.num_features, hidden)
        for features in self.all_features:
            yield from features.shapes(g if self.hybrid is None else self.hybrid.num_estimated, d)
        yield None if self.hybrid is None else self.hybrid.far_bias, (h,)

    def new_state(self) -> State:
        """One row of the state, without numbers."""
        _, g, d = self.heads
        if self.kind == "linear":
            return LinearState.zeros(1, g, self.num_features, d, log_weights=self.log_scaled, device="meta")
        return KVCache.empty(1, g, 1, d, device="meta") if self.kind == "softmax" else NoState()


class FeedForward(NamedTuple):
    """down(f(up x)), or with a gate down(silu(gate x) ⊙ up x); mixture μ: of x + (before − x)·μ, before the token before's."""

    up: Product
    down: Product
    gate: Product | None = None
    function: str = "gelu"  # or squared_relu
    mixture: Tensor | None = None

    @property
    def kind(self) -> str:
        return self.function if self.gate is None else "swiglu"

    def shapes(self, hidden: int) -> Shapes:
        inner = len(self.up.weight)
        yield from self.up.shapes(inner, hidden)
        yield from self.down.shapes(hidden, inner)
        yield self.mixture, (hidden,)
        if self.gate is not None:
            yield from self.gate.shapes(inner, hidden)


class Mixer(Protocol):
    """Base of the records that replace `Attention` in layers of another kind."""

    @property
    def kind(self) -> str:
        """A name of `kernels.cpu.model_step.ATTENTIONS`."""

    def shapes(self, hidden: int) -> Shapes: ...

    def new_state(self) -> State:
        """One row of the state, without numbers."""

    def write(self, block: Block, weights: str) -> None:
        """Put it into the block of weights and its plan, after the layer's kind, norms and feed-forward."""


class Layer(NamedTuple):
    """x + f(norm x) for attention and feed-forward, if it has one (pre-norm), or norm(x + f(x)).

    normed_inside: x + norm(f(x)) in the place of the former.
    """

    attention_norm: Norm
    attention: Attention | Mixer
    mlp_norm: Norm | None = None
    mlp: FeedForward | None = None
    pre_norm: bool = True
    normed_inside: bool = False

    @property
    def norms(self) -> list[Norm]:
        return [x for x in (self.attention_norm, self.mlp_norm) if x is not None]
