"""A plan: what the fused step computes, as the modules of a model describe themselves.

`Plan.add(module)` lets a module describe itself: its class has a method `describe(plan)`, or the plan was given a function for
that class. A description is a record of the module's own weights and numbers. Descriptions are not inherited: a
subclass may compute something else, so it says `describe = Base.describe` where it does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tarnn.decoding.hybrid import Hybrid
from tarnn.decoding.live import check_no_global_hooks, own_method, why_watched
from tarnn.decoding.parts import Attention, Decay, Features, FeedForward, Layer, Norm, Product, Shift
from tarnn.decoding.refusal import Refusal

HEAD_EPS = 1e-6  # of the norms of a head's query, key and output, in the kernel


def describe_linear(module: nn.Linear, plan: "Plan") -> Product:
    return Product(module.weight, module.bias)


def describe_embedding(module: nn.Embedding, plan: "Plan") -> Tensor:
    if module.max_norm is not None:
        raise plan.refusal(module, "changes its weights as it reads them (max_norm)")
    return module.weight


def describe_norm(module: Any, plan: "Plan") -> Norm:
    if module.weight is None:
        raise plan.refusal(module, "has no gain")
    return Norm(module.weight, getattr(module, "bias", None), module.eps, type(module) is not nn.RMSNorm)


def describe_nothing(module: nn.Module, plan: "Plan") -> None:
    """Describe a module that changes no number."""


OF_TORCH: dict[type, Callable[..., Any]] = {
    nn.Linear: describe_linear,
    nn.Embedding: describe_embedding,
    nn.RMSNorm: describe_norm,
    nn.LayerNorm: describe_norm,
    nn.GroupNorm: describe_norm,
    nn.Dropout: describe_nothing,
    nn.Identity: describe_nothing,
}


class Plan:
    """The description of one model.

    classes: functions (module, plan, …) that describe modules of these very classes, for modules without a `describe`.

    Raises Refusal for a model that can't be described, for the reason that the first such module gives.
    """

    norm, product, shift, features, decay = Norm, Product, Shift, Features, Decay
    attention, hybrid = Attention, Hybrid
    feed_forward, layer = FeedForward, Layer

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
        check_no_global_hooks()
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
        if (own := own_method(module)) is not None:
            raise self.refusal(module, f"has a method of its own, {own}")
        if isinstance(module, nn.Module):
            self._check_hooks(module)
        return describe(module, self, *facts, **named)

    def refusal(self, part: Any, why: str) -> Refusal:
        """Return the error for a part of the model: its place, its class, and why it is refused."""
        place = next((name or "the model" for name, x in self.model.named_modules() if x is part), "a part")
        return Refusal(f"{place} ({type(part).__name__}) {why}")

    def _check_hooks(self, module: nn.Module) -> None:
        if (why := why_watched(module)) is not None:
            raise self.refusal(module, why)

    @property
    def attentions(self) -> list[Attention]:
        """Attention records of the layers that use softmax, linear, hybrid or no attention."""
        return [x.attention for x in self.layers if isinstance(x.attention, Attention)]

    def _check_sizes(self) -> None:
        """Refuse layers that are not alike, and weights whose shapes don't fit together: the kernel trusts them."""
        norms = [x for layer in self.layers for x in layer.norms]
        norms += [] if self.last_norm is None else [self.last_norm]
        alike: dict[str, set[Any]] = {
            "heads": {x.heads for x in self.attentions} or {(1, 1, 1)},
            "order of norms": {x.pre_norm for x in self.layers} | {self.last_norm is not None},
            "kind of norms": {x.centred for x in norms},
            "eps of norms": {x.eps if type(x.eps) is float else object() for x in norms},
            "normalize": {x.normalize for x in self.attentions if x.kind == "linear"} or {True},
        }
        if different := [name for name, values in alike.items() if len(values) != 1]:
            raise Refusal(f"its layers differ in their {different[0]}")
        self.pre_norm, self.centred, self.norm_eps = self.layers[0].pre_norm, norms[0].centred, norms[0].eps
        self.normalize: bool = alike["normalize"].pop()
        self.heads: tuple[int, int, int] = alike["heads"].pop()
        for x, *shapes in self._shapes():
            if x is not None and tuple(x.shape) not in shapes:
                place = next((name for name, weight in self.model.named_parameters() if weight is x), "a tensor")
                raise Refusal(f"{place} is {tuple(x.shape)}, which does not fit the other weights")
        for x in self.attentions:
            for width in (features.width(x.heads[2]) for features in x.all_features):
                if width != x.num_features:
                    raise Refusal(f"a feature map makes {width} features, where {x.num_features} are remembered")
        for norm in (n for x in self.attentions for n in (x.q_norm, x.k_norm, x.o_norm) if n):
            if norm.eps != HEAD_EPS or norm.centred:
                raise Refusal(f"norms of queries, keys and outputs are RMSNorms with eps = {HEAD_EPS:g} there")

    def _shapes(self) -> Iterator[tuple[Any, ...]]:
        """Each tensor, and what its shape may be."""
        hidden = len(self.layers[0].attention_norm.gain)
        for table, length in ((self.tokens, len(self.tokens)), (self.places, self.limit)):
            if isinstance(table, Tensor):
                yield table, (length, min(table.shape[1], hidden))
        yield from self.head.shapes(len(self.head.weight), hidden)
        for norm in filter(None, (self.last_norm, *(n for x in self.layers for n in x.norms))):
            yield from ((norm.gain, (hidden,)), (norm.bias, (hidden,)))
        for x in self.layers:
            yield from x.attention.shapes(hidden)
            if x.mlp is not None:
                yield from x.mlp.shapes(hidden)
