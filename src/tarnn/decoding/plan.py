"""A plan: what the fused step computes, as the modules of a model describe themselves.

`Plan.add(module)` lets a module describe itself: its class has a method `describe(plan)`, or the plan was given a function for
that class. A description is a record of the module's own weights and numbers. Descriptions are not inherited: a
subclass may compute something else, so it says `describe = Base.describe` where it does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tarnn.decoding.hybrid import Hybrid

HEAD_EPS = 1e-6  # of the norms of a head's query, key and output, in the kernel
# hooks that change no number: they note what is put out for those who ask, or ask for gradients of the embeddings
HARMLESS = (("transformers.utils.output_capturing", ""), ("transformers.modeling_utils", "make_inputs_require_grads"))


class Refusal(ValueError):
    """Why a model has no fused step: one sentence, without its full stop. The one that `FusedStep` raises has it as its cause."""


class Product(NamedTuple):
    """y = W x + bias, W (outputs, inputs)."""

    weight: Tensor
    bias: Tensor | None = None


class Norm(NamedTuple):
    """Of vectors divided by the root of their mean square (centred: of their variance) + eps."""

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

    function: a name of `kernels.cpu.model_step.FUNCTIONS`. number: of exp, the least that its logarithm may be; of dpfp, ν; of
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


class Decay(NamedTuple):
    """How the state fades: by log_decay (g,), the same for all tokens, by −softplus(rows x), or by log σ(up rows x) / 16."""

    kind: str = "none"
    log_decay: Tensor | None = None
    rows: Product | None = None
    up: Product | None = None


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


class FeedForward(NamedTuple):
    """down(gelu(up x)), or with a gate down(silu(gate x) ⊙ up x)."""

    up: Product
    down: Product
    gate: Product | None = None


class Layer(NamedTuple):
    """x + f(norm x) for attention and feed-forward (pre-norm), or norm(x + f(x))."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: FeedForward
    pre_norm: bool = True


def describe_linear(module: nn.Linear, plan: "Plan") -> Product:
    return Product(module.weight, module.bias)


def describe_embedding(module: nn.Embedding, plan: "Plan") -> Tensor:
    if module.max_norm is not None:
        raise plan.refusal(module, "changes its weights as it reads them (max_norm)")
    return module.weight


def describe_norm(module: Any, plan: "Plan") -> Norm:
    if module.weight is None:
        raise plan.refusal(module, "has no gain")
    return Norm(module.weight, getattr(module, "bias", None), module.eps, type(module) is nn.LayerNorm)


def describe_nothing(module: nn.Module, plan: "Plan") -> None:
    """Of what changes no number."""


OF_TORCH: dict[type, Callable[..., Any]] = {
    nn.Linear: describe_linear,
    nn.Embedding: describe_embedding,
    nn.RMSNorm: describe_norm,
    nn.LayerNorm: describe_norm,
    nn.Dropout: describe_nothing,
    nn.Identity: describe_nothing,
}


class Plan:
    """The description of one model.

    classes: functions (module, plan, …) that describe modules of these very classes, for modules without a `describe`.

    Raises Refusal for a model that can't be described, for the reason that the first such module gives.
    """

    norm, product, shift, features, decay = Norm, Product, Shift, Features, Decay
    attention, feed_forward, layer, hybrid = Attention, FeedForward, Layer, Hybrid

    # a model sets these: what enters the first layer is tokens[id]·scale + places(position), zeros where either is narrower
    tokens: Tensor  # (vocabulary, width)
    scale: float = 1.0
    places: Tensor | Callable[[Tensor], Tensor] | None = None  # a row per position, or positions (b, t) → (b, t, width)
    limit: int | None = None  # positions from 0 to below it
    layers: Sequence[Layer] = ()
    last_norm: Norm | None = None
    head: Product

    def __init__(self, model: nn.Module, classes: Mapping[type, Callable[..., Any]] | None = None):
        self.model, self.classes = model, {**OF_TORCH, **(classes or {})}
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            raise Refusal("there is a hook on all modules")
        self._check_hooks(model)
        if describe := self.classes.get(type(model)) or getattr(type(model), "describe", None):
            describe(model, self)
        if not self.layers:
            raise Refusal(f"it is made for whole models that describe themselves, not for {type(model).__name__}")
        self._check_sizes()

    def add(self, module: Any, *facts: Any, **named: Any) -> Any:
        """The description of a module, or of another part of one such as `Rotary`; facts: what it has to be told.

        None: None. Raises Refusal for one of another class than is known, with hooks or a method of its own, or in training.
        """
        if module is None:
            return None
        kind = type(module)
        describe = self.classes.get(kind) or vars(kind).get("describe")
        if describe is None:
            raise self.refusal(module, "does not describe itself")
        for name, value in vars(module).items():  # as offloading libraries do it
            if callable(value) and not isinstance(value, nn.Module) and hasattr(kind, name):
                raise self.refusal(module, f"has a method of its own, {name}")
        if isinstance(module, nn.Module):
            self._check_hooks(module)
        return describe(module, self, *facts, **named)

    def refusal(self, part: Any, why: str) -> Refusal:
        """What to raise for a part of the model: its place, its class, and why not."""
        place = next((name or "the model" for name, x in self.model.named_modules() if x is part), "a part")
        return Refusal(f"{place} ({type(part).__name__}) {why}")

    def _check_hooks(self, module: nn.Module) -> None:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(_is_harmless, hooks)):
            raise self.refusal(module, "has a hook")
        # others do the same in training: transformers leaves a new head so
        if module.training and not isinstance(module, nn.Linear | nn.Embedding):
            raise self.refusal(module, "is in training mode")

    def _check_sizes(self) -> None:
        """Refuse layers that are not alike, and weights whose shapes don't fit together: the kernel trusts them."""
        norms = [x for layer in self.layers for x in (layer.attention_norm, layer.mlp_norm)]
        norms += [] if self.last_norm is None else [self.last_norm]
        alike: dict[str, set[Any]] = {
            "heads": {x.attention.heads for x in self.layers},
            "order of norms": {x.pre_norm for x in self.layers} | {self.last_norm is not None},
            "kind of norms": {x.centred for x in norms},
            "eps of norms": {x.eps if type(x.eps) is float else object() for x in norms},
            "feed-forward": {(x.mlp.gate is None, *x.mlp.up.weight.shape) for x in self.layers},
            "normalize": {x.attention.normalize for x in self.layers if x.attention.kind == "linear"} or {True},
        }
        if different := [name for name, values in alike.items() if len(values) != 1]:
            raise Refusal(f"its layers differ in their {different[0]}")
        self.pre_norm, self.centred, self.norm_eps = self.layers[0].pre_norm, norms[0].centred, norms[0].eps
        self.normalize: bool = alike["normalize"].pop()
        for x, *shapes in self._shapes():
            if x is not None and tuple(x.shape) not in shapes:
                place = next((name for name, weight in self.model.named_parameters() if weight is x), "a tensor")
                raise Refusal(f"{place} is {tuple(x.shape)}, which does not fit the other weights")
        for norm in (n for x in self.layers for n in (x.attention.q_norm, x.attention.k_norm, x.attention.o_norm) if n):
            if norm.eps != HEAD_EPS or norm.centred:
                raise Refusal(f"norms of queries, keys and outputs are RMSNorms with eps = {HEAD_EPS:g} there")

    def _shapes(self) -> Iterator[tuple[Any, ...]]:
        """Each tensor, and what its shape may be."""
        hidden, inner = self.layers[0].mlp.down.weight.shape
        for table, length in ((self.tokens, len(self.tokens)), (self.places, self.limit)):
            if isinstance(table, Tensor):
                yield table, (length, min(table.shape[1], hidden))
        yield from _of_product(self.head, len(self.head.weight), hidden)
        for norm in (self.last_norm, *(n for x in self.layers for n in (x.attention_norm, x.mlp_norm))):
            if norm is not None:
                yield from ((norm.gain, (hidden,)), (norm.bias, (hidden,)))
        for x in self.layers:
            yield from _of_product(x.mlp.up, inner, hidden)
            yield from _of_product(x.mlp.down, hidden, inner)
            if x.mlp.gate is not None:
                yield from _of_product(x.mlp.gate, inner, hidden)
            yield from _shapes_of_attention(x.attention, hidden)


def _of_product(product: Product, outputs: int, inputs: int) -> Iterator[tuple[Any, ...]]:
    yield product.weight, (outputs, inputs)
    yield product.bias, (outputs,)


def _shapes_of_attention(x: Attention, hidden: int) -> Iterator[tuple[Any, ...]]:
    h, g, d = x.heads
    for product, heads in zip(x.inputs, (h, g, g)[-len(x.inputs) :], strict=True):
        yield from _of_product(product, heads * d, hidden)
    yield from _of_product(x.output, hidden, h * d)
    for norm in (x.q_norm, x.k_norm, x.o_norm):
        yield None if norm is None else norm.gain, (d,)
    yield x.frequencies, ((x.num_features if x.rotates_features else d) // 2,)
    yield x.decay.log_decay, (g,)
    if x.decay.rows is not None:
        rank = g if x.decay.up is None else len(x.decay.rows.weight)
        yield from _of_product(x.decay.rows, rank, hidden)
        if x.decay.up is not None:
            yield from _of_product(x.decay.up, g * x.num_features, rank)
    estimated = g
    if x.hybrid is not None:
        yield x.hybrid.far_bias, (h,)
        estimated = x.hybrid.num_estimated
    for features in filter(None, (x.features, None if x.hybrid is None else x.hybrid.keys)):
        yield from _shapes_of_features(features, estimated, d)
        if features.width(d) != x.num_features:
            raise Refusal(f"a feature map makes {features.width(d)} features, where {x.num_features} are remembered")


def _shapes_of_features(x: Features, g: int, d: int) -> Iterator[tuple[Any, ...]]:
    if x.omega is not None:
        m = x.omega.shape[1]
        yield x.omega, (1, m, d), (g, m, d)
        yield x.bias, (1, m), (g, m)
    for shift in filter(None, (x.queries, x.keys)):
        for tensor in shift[:3]:
            yield tensor, (1, d), (g, d)
        yield shift.constant, (1,), (g,)


def _is_harmless(hook: Any) -> bool:
    home, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")
    return any(home == module and part in name for module, part in HARMLESS)
