"""Drawn calls of every op but linear attention (`fuzz_calls.py`), each from its number alone, and how far outputs, states and
gradients are from the op's definition in float64. A new op is a function that draws its tensors, and a row of `OPS`."""

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

import tarnn
from support.attention_cases import LENGTHS
from support.chunks import tiny_chunks
from support.fuzz_calls import DTYPES, KERNEL_DTYPES, LAYOUTS, LONG, WIDTHS, laid_out
from tarnn import ops
from tarnn.kernels.cpu import library
from tarnn.numerics import wide
from tarnn.ops.convolution.definition import convolution
from tarnn.ops.delta.definition import low_rank_delta, recurrent
from tarnn.ops.features import features, log_features
from tarnn.ops.hybrid import definition as hybrid_definition
from tarnn.ops.hybrid.arguments import scores
from tarnn.ops.scan import definition as scans

Tensors = dict[str, Tensor]
JUNK = (0.0, 1e4, torch.nan, torch.inf)
WAYS = ("whole", "whole", "whole", "continued", "packed", "packed continued", "stepped", "stepped in place")
LIMITS = (1e-11, 1e-11, 1e-8)  # of outputs, states and gradients in float64


class Results(NamedTuple):
    """in_time: o, and what else has an entry for each token. behind: the tensors of the state."""

    in_time: list[Tensor]
    behind: list[Tensor]
    state: Any = None


class Op(NamedTuple):
    """Tensors are given by name; options are what else a call has."""

    draw: Callable[..., tuple[Tensors, dict[str, Any]]]  # draw(rng, rand, b, t, dtype), a state among them
    run: Callable[..., Results]  # run(tensors, state, return_state=, key_mask=, cu_seqlens=, **options)
    define: Callable[..., Results]  # define(tensors, tensor of the state, key_mask=, **options) of one sequence
    state: Callable[[Tensor], Any]
    step: Callable[..., Results] | None = None  # step(tensors, state, inplace=, **options)
    axis: int = 2  # of time
    constant: tuple[str, ...] = ()  # tensors without it
    narrow: tuple[str, ...] = ("q", "k", "v")  # tensors in the dtype of the call; others are in the wide one,
    mixes: bool = False  # or in that of the call, too
    spoilt: tuple[str, ...] = ("k", "v")  # in which anything may stand at masked tokens
    ways: tuple[str, ...] = WAYS
    least: float = 2.0  # units in the last place that outputs and states may err besides
    units: Callable[[Tensors], float] = lambda tensors: 2.0  # in the last place, that gradients may err besides:
    of_outputs: bool = False  # in that of outputs, as which they are rounded; else in their own


@dataclass(frozen=True)
class Drawn:
    """A call. cuts: where packed sequences end, or the first part does. sent: what comes back to the results."""

    op: Op
    number: int
    tensors: Tensors
    options: dict[str, Any]
    way: str
    cuts: list[int]
    key_mask: Tensor | None
    tiny_chunks: bool
    watched: bool  # by autograd
    sent: list[Tensor] = field(default_factory=list)

    def leaves(self, dtype: torch.dtype | None = None) -> "Drawn":
        """As they lie; or in this dtype, with zeros at masked tokens, as the definition needs them."""

        def leaf(name: str, x: Tensor) -> Tensor:
            if dtype is None:
                return x.detach().requires_grad_(self.watched)
            x = x.detach().to(dtype).contiguous()
            return (self.at_masked(x, 0.0) if name in self.op.spoilt else x).requires_grad_()

        return replace(self, tensors={name: leaf(name, x) for name, x in self.tensors.items()})

    def at_masked(self, x: Tensor, value: float) -> Tensor:
        if self.key_mask is None or x.ndim < self.op.axis + 1:
            return x
        there = self.key_mask[:, None] if self.op.axis == 2 else self.key_mask
        return x.masked_fill(~there.view(*there.shape, *[1] * (x.ndim - there.ndim)), value)

    def nearby(self, seed: int) -> "Drawn":
        """With inputs that differ in their last place, or not: it is as sensitive to rounding. Seed 0: itself."""
        generator = torch.Generator().manual_seed(seed)

        def changed(x: Tensor) -> Tensor:
            by = torch.randint(-1, 2, x.shape, generator=generator)
            return x * (1 + torch.finfo(x.dtype).eps * by.to(x.dtype))

        return replace(self, tensors={name: changed(x) for name, x in self.tensors.items()}) if seed else self

    def _part(self, at: Any) -> Tensors:
        index = (*[slice(None)] * self.op.axis, at)
        timeless = {name for name, x in self.tensors.items() if name in self.op.constant or x.ndim <= self.op.axis}
        return {n: x if n in timeless else x[index] for n, x in self.tensors.items() if n != "state"}

    def _options(self, at: Any) -> dict[str, Any]:
        return self.options if self.key_mask is None else self.options | {"key_mask": self.key_mask[:, at]}

    def _call(self, at: Any, state: Any, cuts: list[int] | None = None, last: bool = True) -> Results:
        more = {} if cuts is None else {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}
        return self.op.run(self._part(at), state, return_state=not last, **self._options(at), **more)

    def _joined(self, parts: list[Results]) -> Results:
        outputs = [torch.cat(xs, self.op.axis) for xs in zip(*(x.in_time for x in parts))]
        return Results(outputs, parts[-1].behind, parts[-1].state)

    def run(self) -> Results:
        """By the op or its steps, in the way that was drawn."""
        given, parts, places = self.tensors.get("state"), [], []
        state = None if given is None else self.op.state(given.clone() if self.way == "stepped in place" else given)
        if self.way in ("whole", "packed"):
            return self._call(slice(None), state, self.cuts if self.way == "packed" else None)
        if self.way == "continued":
            first = self._call(slice(0, self.cuts[0]), state, last=False)
            return self._joined([first, self._call(slice(self.cuts[0], None), first.state)])
        if self.way == "packed continued":  # a third of each sequence, then the rest of each
            spans = [(i, i + (j - i) // 3, j) for i, j in zip(self.cuts, self.cuts[1:])]
            for n in (0, 1):
                places.append(torch.cat([torch.arange(span[n], span[n + 1]) for span in spans]))
                lengths = torch.tensor([0, *(span[n + 1] - span[n] for span in spans)])
                parts.append(self._call(places[n], state, lengths.cumsum(0).tolist(), last=n == 1))
                state = parts[n].state
            whole, order = self._joined(parts), torch.cat(places).argsort()
            return whole._replace(in_time=[x.index_select(self.op.axis, order) for x in whole.in_time])
        for i in range(self.length):
            one = self._part(slice(i, i + 1))
            parts.append(self.op.step(one, state, inplace=self.way == "stepped in place", **self.options))
            state = parts[-1].state
        return self._joined(parts)

    @property
    def length(self) -> int:
        return next(iter(self.tensors.values())).shape[self.op.axis]

    def defined(self) -> Results:
        """By the definition; sequence after sequence."""
        given, parts = self.tensors.get("state"), []
        spans = list(zip(self.cuts, self.cuts[1:])) if self.way.startswith("packed") else [(0, self.length)]
        for row, span in enumerate(spans):
            state = given if given is None or len(spans) == 1 else given[row : row + 1]
            parts.append(self.op.define(self._part(slice(*span)), state, **self._options(slice(*span))))
        return self._joined(parts)._replace(behind=[torch.cat(xs) for xs in zip(*(x.behind for x in parts))])

    def numbers(self, results: Results) -> list[list[Tensor]]:
        """Outputs, states and gradients."""
        outputs, inputs, gradients = [*results.in_time, *results.behind], list(self.tensors.values()), []
        pairs = [(y, g.to(y.dtype)) for y, g in zip(outputs, self.sent) if y.requires_grad]
        if self.watched:
            gradients = [torch.zeros_like(x) for x in inputs]
        if self.watched and pairs:
            ys, sent = zip(*pairs)
            gradients = torch.autograd.grad(ys, inputs, sent, allow_unused=True, materialize_grads=True)
        return [[x.detach() for x in xs] for xs in (results.in_time, results.behind, gradients)]


def drawn(name: str, number: int, dtype: str | None = None) -> Drawn:
    """Call `number` of this op."""
    rng, generator = random.Random(f"{name}/{number}"), torch.Generator().manual_seed(number)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    op, maybe, narrow = OPS[name], lambda p: rng.random() < p, DTYPES[dtype or rng.choice(KERNEL_DTYPES)]
    t, way = rng.choice(LONG) if maybe(0.15) else rng.choice(LENGTHS), rng.choice(op.ways)
    t = max(1, min(t, 17)) if way.startswith("stepped") else t
    b = 1 if way.startswith("packed") else rng.choice([1, 1, 2, 3])
    tensors, options = op.draw(rng, rand, b, t, narrow)
    if not options.get("causal", True):
        way = "packed" if way.startswith("packed") else "whole"
    cuts = sorted(rng.randint(0, t) for _ in range(rng.randint(0, 4)))
    cuts = [0, *cuts, t] if way.startswith("packed") else [rng.randint(0, t)]
    state = tensors.pop("state", None)
    if state is not None and (way == "stepped in place" or maybe(0.5)):
        tensors["state"] = rand(len(cuts) - 1 if way.startswith("packed") else b, *state.shape[1:])
    key_mask = rand(b, t) > -0.5 if maybe(0.35) and not way.startswith("stepped") else None
    watched = way != "stepped in place" and maybe(0.8)
    call = Drawn(op, number, tensors, options, way, cuts, key_mask, maybe(0.4), watched)
    mixed, junk = op.mixes and maybe(0.5), rng.choice(JUNK)
    for name, x in tensors.items():
        x = x.to(narrow if name in op.narrow or (mixed and name != "state") else wide(narrow))
        x = call.at_masked(x, junk) if name in op.spoilt else x
        if name == "state" and x.ndim > 2 and maybe(0.3):
            x = x.mT.contiguous().mT
        elif name not in ("state", *op.constant) and x.ndim > 2 and maybe(0.5):
            layout = rng.choice(LAYOUTS)
            x = laid_out(x, layout) if x.ndim == 4 else laid_out(x[:, None], layout)[:, 0]
        tensors[name] = x
    with torch.no_grad():
        results = call.leaves(torch.float64).defined()
    behind = narrow if "state" in op.narrow else wide(narrow)
    sent = [rand(*x.shape).to(narrow) for x in results.in_time]
    sent += [rand(*x.shape).to(behind) for x in results.behind] if maybe(0.5) else []
    return replace(call, sent=[laid_out(sent[0], rng.choice(LAYOUTS)), *sent[1:]] if sent[0].ndim == 4 else sent)


def excess(name: str, number: int, dtype: str | None = None) -> float:
    """The largest error over what may be: twice that of the definition computed in the wide dtype and rounded, and some units in
    the last place. One such error is luck: where ours is beyond it, the largest of eight more counts, of calls whose inputs
    differ in the last place. ∞: something to the bit is not as it should be."""
    call = drawn(name, number, dtype)
    ours, steady = computed(drawn(name, number, dtype))  # which spoils it
    if not steady or ours[0][0].dtype != next(iter(call.tensors.values())).dtype:
        return math.inf
    exact = call.leaves(torch.float64)
    right = exact.numbers(exact.defined())
    mine, units = errors(ours, right), (call.op.least, call.op.least, call.op.units(call.tensors))
    allowed, worst = [0.0] * len(mine), 0.0
    for seed in range(9):
        naive = call.leaves(wide(next(iter(call.tensors.values())).dtype)).nearby(seed)
        naive = naive.leaves(next(iter(naive.tensors.values())).dtype)
        rounded = [[x.to(y.dtype) for x, y in zip(*xs)] for xs in zip(naive.numbers(naive.defined()), ours)]
        allowed = [max(pair) for pair in zip(allowed, errors(rounded, right))]
        of_gradients = ours[0][0].dtype if call.op.of_outputs else torch.float64
        kinds = [(i, x.dtype if i < 2 else coarser(x.dtype, of_gradients)) for i, xs in enumerate(ours) for x in xs]
        least = [LIMITS[i] if of == torch.float64 else units[i] * torch.finfo(of).eps for i, of in kinds]
        worst = max((x / (2 * y + unit) for x, y, unit in zip(mine, allowed, least)), default=0.0)
        if worst <= 1:
            break
    return worst


def computed(call: Drawn) -> tuple[list[list[Tensor]], bool]:
    """Our numbers, and whether the laws that know no rounding hold, each tried on a part of the calls: neither the number of
    threads nor what comes later changes a bit."""
    watched, steady, threads = call.leaves(), True, torch.get_num_threads()
    with tiny_chunks() if call.tiny_chunks else nullcontext():
        ours = watched.numbers(watched.run())
        if call.number % 8 == 0 and library.available():
            torch.set_num_threads(threads + 1)
            again = watched.numbers(watched.run())
            torch.set_num_threads(threads)
            steady = all(torch.equal(*map(_known, pair)) for xs in zip(ours, again) for pair in zip(*xs))
        if call.number % 4 == 1 and call.way == "whole" and call.options.get("causal", True):
            cut, before = call.length // 2, (*[slice(None)] * call.op.axis, slice(0, call.length // 2))
            for name in set(call.op.narrow) & set(call.tensors) - {"state", *call.op.constant}:
                x = call.tensors[name].detach()
                (x[:, :1] if x.stride(1) == 0 and call.op.axis == 2 else x)[(*before[:-1], slice(cut, None))] = 0.3
            changed = call.leaves()
            steady = torch.equal(*(_known(x.detach()[before]) for x in (changed.run().in_time[0], ours[0][0])))
    return ours, steady


def coarser(x: torch.dtype, y: torch.dtype) -> torch.dtype:
    return max(x, y, key=lambda dtype: torch.finfo(dtype).eps)


def _known(x: Tensor) -> Tensor:
    return x.nan_to_num(7.0)


def errors(found: list[list[Tensor]], right: list[list[Tensor]]) -> list[float]:
    """The largest difference of each result, over the largest number that is right: of gradients, of any of them. ∞ where
    something is no number that should be."""
    errors = []
    for i, (ours, exact) in enumerate(zip(found, right)):
        sizes = [y.abs().max().item() if y.numel() else 0.0 for y in exact]
        for x, y, size in zip(ours, exact, sizes):
            assert x.shape == y.shape, (i, x.shape, y.shape)
            too_large = y.abs() >= 0.99 * torch.finfo(x.dtype).max  # for this dtype
            difference = (x.double() - y).abs().masked_fill(too_large, 0.0)
            error = difference.max().item() / max(*sizes, size, 1e-6) if i == 2 and x.numel() else 0.0
            if i < 2 and x.numel():
                error = difference.max().item() / max(size, 1e-6)
            errors.append(math.inf if math.isnan(error) else error)
    return errors


# --- the ops


def _decays(rng: random.Random, rand: Callable, b: int, n: int, t: int, d: int) -> Tensors:
    kind, other = (
        rng.choice(["none", "head", "token", "token", "channel", "channel"]),
        rng.choice([0.01, 0.3, 1.0, 30.0]),
    )
    if kind == "none":
        return {}
    x = -other * rand(*{"head": (n,), "token": (b, n, t), "channel": (b, n, t, d)}[kind]).abs()
    steep = rng.choice(["mild", "mild", "five", "resets", "huge"])  # e^160 after 32 tokens of −5
    some = torch.zeros_like(x, dtype=torch.bool) if kind == "head" else rand(*x.shape) > 1.3
    return {
        "log_decay": x - 5
        if steep == "five"
        else x.masked_fill(some, {"resets": -torch.inf, "huge": -1e6}.get(steep, -1.0))
    }


def _delta(rng, rand, b, t, dtype):
    heads, times, d, e = rng.choice([1, 2, 3]), rng.choice([1, 1, 2, 3]), rng.choice(WIDTHS), rng.choice([*WIDTHS, 0])
    h, g, m = rng.choice([(heads * times, heads, heads), (heads, heads, heads * times)])
    norm, kind, k = (
        rng.choice([1e-6, 1e-6, 0.3, None]),
        rng.choice(["any", "any", "equal", "zero", "alike"]),
        rand(b, g, t, d),
    )
    if kind == "equal":
        k = torch.where(rand(b, g, t, 1) > 0, k[:, :, :1], k)
    if kind == "alike":
        k = k[:, :, :1] + 0.05 * k
    if norm is None:  # |k| at most 1
        k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-3) * rand(b, g, t, 1).abs().clamp(max=0.98)
    k = k.masked_fill(rand(b, g, t, 1) > 0.8, 0.0) if kind == "zero" else k
    beta, other, n = rand(b, max(g, m), t).sigmoid(), rand(b, max(g, m), t), max(g, m)
    ends = torch.where(other > 0.5, 2.0, torch.where(other < -0.5, 0.0, 1.0)).double()
    beta = rng.choice([beta, 2 * beta, 2 * beta, ends])
    tensors = {"q": rand(b, h, t, d), "k": k, "v": rand(b, m, t, e), "beta": beta, **_decays(rng, rand, b, n, t, d)}
    return tensors | {"state": rand(b, n, d, e)}, {"norm": norm}


def _run_delta(x, state, *, norm, return_state, **masks):
    o, after = ops.delta_rule(**x, normalize_qk=norm or False, state=state, return_state=True, **masks)
    return Results([o], [after.S], after)


def _step_delta(x, state, *, norm, inplace):
    o, after = ops.delta_step(**x, normalize_qk=norm or False, state=state, inplace=inplace)
    return Results([o], [after.S], after)


def _define_delta(x, S, *, norm, **mask):
    o, S = recurrent(**x, scale=x["q"].shape[3] ** -0.5, norm_eps=norm, state=S, **mask)
    return Results([o], [S])


def _low_rank(rng, rand, b, t, dtype):
    """Vectors of RWKV-7's kind, such that the state stays bounded."""
    h, d, e = rng.randint(1, 3), rng.randint(1, 40), rng.randint(1, 70)
    direction = normalize(rand(b, h, t, d), dim=-1)
    tensors = {"q": rand(b, h, t, d), "k": rand(b, h, t, d), "v": rand(b, h, t, e), "a": -direction}
    tensors |= {"b": direction * rand(b, h, t, d).sigmoid(), **_decays(rng, rand, b, h, t, d)}
    return tensors | {"state": rand(b, h, d, e)}, {}


def _run_low_rank(x, state, *, return_state, **masks):
    o, after = ops.low_rank_delta_rule(**x, state=state, return_state=True, **masks)
    return Results([o], [after.S], after)


def _step_low_rank(x, state, *, inplace):
    o, after = ops.low_rank_delta_step(**x, state=state, inplace=inplace)
    return Results([o], [after.S], after)


def _define_low_rank(x, S, **mask):
    o, S = low_rank_delta(**x, scale=x["q"].shape[3] ** -0.5, S=S, **mask)
    return Results([o], [S])


CHANNELS = (1, 3, 8, 15, 16, 17, 33, 64, 65, 130, 260)


def _diagonal(rng, rand, b, t, dtype):
    c = rng.choice(CHANNELS)
    log_decay = -rand(b, t, c).square()
    if rng.random() < 0.3:
        log_decay[:, ::7] = rng.choice((0.0, -5.0, -torch.inf))
    return {"x": rand(b, t, c), "log_decay": log_decay, "state": rand(b, c)}, {}


def _selective(rng, rand, b, t, dtype):
    c, n = rng.choice(CHANNELS), rng.choice((1, 2, 3, 4, 7, 8, 16, 17))
    tensors = {"x": rand(b, t, c), "dt": (rand(b, t, c) - 2).exp(), "A": -(rand(c, n) + 1).exp()}
    tensors |= {"B": rand(b, t, n), "C": rand(b, t, n)} | ({"D": rand(c)} if rng.random() < 0.5 else {})
    return tensors | {"state": rand(b, c, n)}, {}


def _scan(kind: str) -> Op:
    function, one, exact = getattr(ops, kind), getattr(ops, f"{kind}_step"), getattr(scans, kind)

    def results(pair):
        return Results([pair[0]], [pair[1].h], pair[1])

    return Op(
        _diagonal if kind == "diagonal_scan" else _selective,
        lambda x, state, *, return_state, **masks: results(function(**x, state=state, return_state=True, **masks)),
        lambda x, h, **mask: Results(*([y] for y in exact(**x, h=h, **mask))),
        ops.ScanState,
        lambda x, state, *, inplace: results(one(**x, state=state, inplace=inplace)),
        axis=1,
        constant=("A", "D"),
        narrow=("x", "B", "C"),
        mixes=True,
        spoilt=("x", "log_decay", "dt", "B", "C"),
    )


def _convolution(rng, rand, b, t, dtype):
    c, width = rng.choice((1, 3, 5, 16, 17, 33, 70)), rng.choice((1, 2, 3, 4, 4, 4, 5, 7, 16, 31))
    options = {"causal": rng.random() < 0.7, "activation": rng.choice((None, "silu"))}
    tensors = {"x": rand(b, t, c), "weight": rand(c, width)} | ({"bias": rand(c)} if rng.random() < 0.6 else {})
    return tensors | ({"state": rand(b, width - 1, c)} if options["causal"] else {}), options


def _run_convolution(x, state, *, causal, return_state, **options):
    if not causal:
        return Results([ops.short_convolution(**x, causal=False, **options)], [])
    o, after = ops.short_convolution(**x, state=state, return_state=True, **options)
    return Results([o], [after.tokens], after)


def _step_convolution(x, state, *, causal, **options):
    o, after = ops.short_convolution_step(**x, state=state, **options)
    return Results([o], [after.tokens], after)


def _define_convolution(x, state, *, causal, **options):
    o, after = convolution(**x, state=state, causal=causal, **options)
    return Results([o], [after] if causal else [])


def _hybrid(rng, rand, b, t, dtype):
    g, r, d, e = (
        rng.choice((1, 2)),
        rng.choice((1, 1, 2, 3)),
        *(rng.choice((1, 3, 4, 8, 16, 17, 32, 64, 72)) for _ in "de"),
    )
    tensors = {"q": rand(b, g * r, t, d), "k": rand(b, g, t, d), "v": rand(b, g, t, e), "far_bias": rand(g * r)}
    options = {
        "causal": rng.random() < 0.5,
        "window": rng.choice((1, 2, 7, 31, 64, 65, 128, 300)),
        "sinks": rng.choice((0, 0, 1, 3, 70)),
        # which keys stand in slots may hang on a rounding, and then all of the rest does
        "slots": rng.choice((0, 0, 1, 5)) if dtype == torch.float64 else 0,
        "scale": rng.choice((d**-0.5, 0.2)),
        "softcap": rng.choice((None, None, 2.0)),
        "share": rng.random() < 0.5,
    }
    if options["causal"] and rng.random() < 0.4:
        tensors["log_decay"] = -rand(b, g, t).abs() * rng.choice((0.01, 1.0))
    kind, m = rng.choice(("none", "favor", "favor", "elu", "exp", "clusters")), rng.choice((4, 16, 40))
    maps = {"elu": tarnn.Elu(), "exp": tarnn.feature_maps.Exp(), "none": None}
    maps["favor"] = tarnn.PositiveRandomFeatures(d, m, seed=t)
    maps["clusters"] = tarnn.feature_maps.QueryClusters(d, m, num_heads=g, seed=t).double().requires_grad_(False)
    options["phi"] = maps[kind]
    return tensors, options


def _run_hybrid(x, state, *, phi, share, return_state, **options):
    results = ops.hybrid_attention(
        feature_map=phi, state=state, return_state=return_state, return_far_share=share, **x, **options
    )
    o, *more = results if isinstance(results, tuple) else (results,)
    return Results([o, *more[return_state:]], [], more[0] if return_state else None)


def _step_hybrid(x, state, *, inplace, **options):
    return _run_hybrid(x, state, return_state=True, inplace=inplace and state is not None, **options)


def _define_hybrid(x, state, *, phi, share, **options):
    x, scale = dict(x), options.pop("scale")
    far_bias, far = x.pop("far_bias"), None
    score = scores(phi, x["k"], scale, options["softcap"]) if options["slots"] else None
    if phi is not None:
        far = log_weights(phi, x["q"], x["k"]) + far_bias[None, :, None, None]
    results = hybrid_definition.hybrid(**x, far_weight=far, scale=scale, score=score, **options)
    return Results(list(results[: 1 + share]), [])


def log_weights(phi: torch.nn.Module, q: Tensor, k: Tensor) -> Tensor:
    """log φ(q_i)·φ(k_j), (b, h, t, t)."""
    r = q.shape[1] // k.shape[1]
    if phi.log_features:
        y, x = log_features(phi, q, "queries"), log_features(phi, k, "keys").repeat_interleave(r, 1)
        return (y[:, :, :, None] + x[:, :, None]).logsumexp(-1)
    (y, a), (x, b) = features(phi, q, "queries"), features(phi, k, "keys")
    log = (y @ x.repeat_interleave(r, 1).mT).log()
    log = log if a is None else log + a[..., None]
    return log if b is None else log + b.repeat_interleave(r, 1)[:, :, None]


OPS = {
    # torch solves triangular systems in another order on each processor
    "delta": Op(_delta, _run_delta, _define_delta, ops.DeltaState, _step_delta, least=8.0),
    "low rank": Op(
        _low_rank,
        _run_low_rank,
        _define_low_rank,
        ops.DeltaState,
        _step_low_rank,
        narrow=("q", "k", "v", "a", "b"),
        spoilt=("k", "v", "a", "b"),
        units=lambda x: 33.0,
    ),
    "diagonal scan": _scan("diagonal_scan"),
    "selective scan": _scan("selective_scan"),
    "convolution": Op(
        _convolution,
        _run_convolution,
        _define_convolution,
        ops.ConvolutionState,
        _step_convolution,
        axis=1,
        constant=("weight", "bias"),
        narrow=("x", "state"),
        mixes=True,
        spoilt=("x",),
        units=lambda x: 2 + x["x"][..., 0].numel() ** 0.5 / 2,  # of weights, one token after the other
    ),
    "hybrid": Op(
        _hybrid,
        _run_hybrid,
        _define_hybrid,
        lambda S: None,
        _step_hybrid,
        constant=("far_bias",),
        spoilt=("q", "k", "v"),
        ways=("whole", "whole", "continued", "packed", "stepped", "stepped in place"),
        of_outputs=True,
        units=lambda x: 2 + 3 * x["v"].shape[-1] ** 0.5,  # each of a weight is the difference of two sums of e products
    ),
}
