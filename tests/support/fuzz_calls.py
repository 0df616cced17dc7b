"""Drawn calls of linear attention, each from its number alone: what is asked, how our code is made to do it, and what
the definition says, in any dtype."""

import math
import random
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from support import features
from support.attention_cases import LENGTHS, MAPS, Case
from tarnn import feature_maps
from tarnn.kernels.cpu import library
from tarnn.numerics import default_eps, wide
from tarnn.ops import LinearState, linear_attention, step
from tarnn.ops.linear import definition as linear_definition

PROJECTED = ["positive", "hyperbolic", "optimal", "random relu"]  # made of a projection, within the kernels
PAPER_NAMES = {"random relu": "relu"}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDEST = "float64" if library.computes_float64() else "float32"  # of the compiled kernels: see tests/float64.sh
KERNEL_DTYPES = [WIDEST, "float32", "bfloat16", "float16"]
WIDTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 33, 48, 64, 67]
LONG = [97, 127, 128, 129, 251]
LAYOUTS = ["contiguous", "as projected", "every second", "wider", "expanded", "transposed"]


@dataclass(frozen=True)
class Drawn:
    """A call in words. q (b, g·r, t, d); k (b, g, s, d); v (b, g, s, e)."""

    number: int
    seed: int
    b: int
    g: int
    r: int
    t: int
    s: int
    d: int
    e: int
    dtype: str
    feature_map: str
    causal: bool
    normalize: bool
    masked: bool
    junk: str  # what lies at masked keys: "", "huge", "nan" or "inf"
    decay: str
    weighted: bool
    options_narrow: bool  # decay and log-weights in the dtype of q, rather than in the wide one
    spread: float
    way: str  # whole, continued, packed, packed continued, stepped, stepped in place
    layouts: tuple[str, ...]  # of q, k, v and the gradient of o
    state_grads: bool  # gradients come back through the state too
    tiny_chunks: bool
    threads: int
    m: int = 0  # features of maps that project
    steep: float = 0.0  # see `Case`

    @property
    def features(self) -> int:
        return self.m or self.d

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def draw(seed: int, number: int) -> Drawn:
    """Call `number` of the run with this seed."""
    call = projected(draw_plain(seed, number), random.Random(f"{seed}/{number}/projected"))
    call = steeper(call, random.Random(f"{seed}/{number}/steep"))
    return side_by_side(call, random.Random(f"{seed}/{number}/side by side"))


def side_by_side(call: Drawn, rng: random.Random) -> Drawn:
    """A fifth of the calls: all tensors as models have them, views of (b, t, h·d)."""
    return replace(call, layouts=("as projected",) * 4) if rng.random() < 0.2 else call


def steeper(call: Drawn, rng: random.Random) -> Drawn:
    """A fifth of the causal calls: strong decays, of channels, with log-weights that fall."""
    if not call.causal or rng.random() > 0.2:
        return call
    decay = rng.choice(["token", "channel", "channel"])
    return replace(call, decay=decay, weighted=True, steep=rng.choice([5.0, 6.0, 20.0, 100.0, math.inf]))


def projected(call: Drawn, rng: random.Random) -> Drawn:
    """A quarter of the calls: with random features."""
    if rng.random() > 0.25:
        return call
    name, m = rng.choice(PROJECTED), rng.choice(WIDTHS)
    m += m % 2 if name == "hyperbolic" else 0
    spread = call.spread
    if not call.normalize and name != "random relu" and call.dtype != "float64":
        spread = min(spread, 0.1 if call.dtype == "float16" else 1.0)
    return replace(call, feature_map=name, m=m, spread=spread)


def draw_plain(seed: int, number: int) -> Drawn:
    """With one of the elementwise maps."""
    rng = random.Random(f"{seed}/{number}")
    pick, maybe = rng.choice, lambda p: rng.random() < p
    feature_map, causal = pick(list(MAPS)), maybe(0.65)
    way = pick(["whole"] * 4 + ["continued", "packed"] + ["packed continued", "stepped", "stepped in place"] * causal)
    length = pick(LONG) if maybe(0.06) else pick(LENGTHS)
    masked = maybe(0.4) and not way.startswith("stepped")
    packed, s = way.startswith("packed"), min(length, 17) if way.startswith("stepped") else length
    dtype, weighted = pick([WIDEST, *KERNEL_DTYPES]), maybe(0.4)
    normalize, spread = feature_map != "identity" and maybe(0.7), pick([0.1, 1.0, 1.0, 3.0])
    if not normalize and (weighted or feature_map == "exp") and dtype != "float64":
        spread = min(spread, 0.1 if dtype == "float16" else 1.0)  # e^w is a factor of o, and has to have room in it
    return Drawn(
        number,
        rng.getrandbits(31),
        b=1 if packed else pick([1, 1, 2, 3]),
        g=pick([1, 1, 2, 3]),
        r=pick([1, 1, 2, 3]),
        t=s if causal or packed or maybe(0.4) else pick(LENGTHS),
        s=s,
        d=pick(WIDTHS),
        e=0 if maybe(0.02) else pick(WIDTHS),
        dtype=dtype,
        feature_map=feature_map,
        causal=causal,
        normalize=normalize,
        masked=masked,
        junk=pick(["", "huge", "nan", "inf"]) if masked else "",
        decay=pick(["none", "none", "head", "token", "channel"]) if causal else "none",
        weighted=weighted,
        options_narrow=maybe(0.3),
        spread=spread,
        way=way,
        layouts=tuple(pick(LAYOUTS) if maybe(0.5) else "contiguous" for _ in range(4)),
        state_grads=maybe(0.5),
        tiny_chunks=maybe(0.5),
        threads=pick([1, 2]),
    )


@cache
def map_of(name: str, d: int, m: int, g: int, seed: int) -> torch.nn.Module:
    """A feature map by its name; random ones with m features of d channels."""
    if name in MAPS:
        return MAPS[name]
    if name == "optimal":  # with parameters of each head
        made = feature_maps.OptimalRandomFeatures(d, m, num_heads=g, A=-0.1, seed=seed)
        made.A.mul_(torch.arange(1.0, g + 1)[:, None, None])
        return made
    kinds = {
        "positive": feature_maps.PositiveRandomFeatures,
        "hyperbolic": feature_maps.HyperbolicRandomFeatures,
        "random relu": feature_maps.GeneralizedRandomFeatures,
    }
    return kinds[name](d, m, seed=seed)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values of x (b, h, t, d) as they may lie in memory; what lies between them is NaN."""
    b, h, t, d = x.shape
    nan = lambda *shape: torch.full(shape, torch.nan, dtype=x.dtype)  # noqa: E731
    match layout:
        case "as projected":  # (b, t, h·d)
            out = nan(b, t, h, d).transpose(1, 2)
        case "every second":
            out = nan(b, h, 2 * t, d)[:, :, ::2]
        case "wider":
            out = nan(b, h, t, d + 3)[..., 1 : d + 1]
        case "transposed":
            out = nan(b, h, d, t).mT
        case "expanded":  # one head's values in all
            return x[:, :1].contiguous().expand(b, h, t, d)
        case _:
            return x.clone()
    return out.copy_(x)


class Call:
    """The tensors of a drawn call, and two ways to compute it: ours and the definition's.

    Both give [o, S·e^M, z·e^M, and the gradients of q, k, v, log-decay and log-weights], the sums in float64. What comes back
    through S and z is in units of e^M too: of the M that the definition has in float64, once that is known.
    """

    M: Tensor | None = None

    def __init__(self, drawn: Drawn):
        self.drawn = a = drawn
        dtype = DTYPES[a.dtype]
        case = Case(
            b=a.b,
            g=a.g,
            r=a.r,
            t=a.s,
            d=a.d,
            e=a.e,
            masked=a.masked,
            decay=a.decay,
            weighted=a.weighted,
            spread=a.spread,
            seed=a.seed,
            dtype=dtype,
            f=a.features,
            steep=a.steep,
        )
        self.feature_map = map_of(a.feature_map, a.d, a.m, a.g, a.seed)
        generator = torch.Generator().manual_seed(a.seed + 1)
        rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        q = case.q if a.t == a.s else (rand(a.b, a.g * a.r, a.t, a.d) * a.spread).to(dtype)
        self.mask = case.options.pop("key_mask", None)
        if a.junk:
            for x in (case.k, case.v):
                x.masked_fill_(~self.mask[:, None, :, None], {"huge": 1e4, "nan": torch.nan, "inf": torch.inf}[a.junk])
        narrow = dtype if a.options_narrow else wide(dtype)
        self.names = list(case.options)  # of the options that have a gradient
        self.inputs = [laid_out(x, how) for x, how in zip((q, case.k, case.v), a.layouts)]
        self.inputs += [x.to(narrow) for x in case.options.values()]
        self.cuts = self._cuts(random.Random(a.seed))
        n = len(self.cuts) - 1 if a.way.startswith("packed") else a.b
        grad_o = laid_out(rand(a.b, a.g * a.r, a.t, a.e).to(dtype), a.layouts[3])
        self.grads = [grad_o, *([rand(n, a.g, a.features, a.e), rand(n, a.g, a.features)] if a.state_grads else [])]

    def nearby(self, seed: int) -> "Call":
        """The same call with each input changed by a unit in its last place, or not: it is as sensitive to rounding."""
        generator, made = torch.Generator().manual_seed(seed), copy(self)
        made.M = None
        by = [torch.randint(-1, 2, x.shape, generator=generator) for x in self.inputs]
        made.inputs = [x * (1 + torch.finfo(x.dtype).eps * i.to(x.dtype)) for x, i in zip(self.inputs, by)]
        return made

    def _cuts(self, rng: random.Random) -> list[int]:
        """Where sequences end (packed), or where the first part does."""
        s = self.drawn.s
        inner = sorted(rng.randint(0, s) for _ in range(rng.randint(0, 4)))
        return [0, *inner, s] if self.drawn.way.startswith("packed") else [rng.randint(0, s)]

    def _results(self, o: Tensor, S: Tensor, z: Tensor, M: Tensor | None, leaves: list[Tensor]) -> list[Tensor]:
        sums = [S.double(), z.double()]
        if M is not None:
            M = M.double() if M.ndim == 3 else M.double()[..., None]  # one for each feature, or for all
            factor = torch.where(M == -torch.inf, 0.0, M).exp()
            sums = [sums[0] * factor[..., None], sums[1] * factor]
            if self.M is not None:
                units = (M - self.M[..., None]).nan_to_num(0.0).exp()  # both may be −∞
                S, z = S * units[..., None].to(S.dtype), z * units.to(z.dtype)
        pairs = [(y, g.to(y.dtype)) for y, g in zip((o, S, z), self.grads) if y.requires_grad]
        grads = [torch.zeros_like(x) for x in leaves]
        if pairs:
            grads = torch.autograd.grad(
                [y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, materialize_grads=True
            )
        return [o, *sums, *grads]

    def to(self, device: str) -> "Call":
        """This call with its tensors there; the definition is computed on the CPU before."""
        self.inputs, self.grads = ([x.to(device) for x in xs] for xs in (self.inputs, self.grads))
        self.mask, self.M = (None if x is None else x.to(device) for x in (self.mask, self.M))
        self.feature_map = deepcopy(self.feature_map).to(device)
        return self

    def ours(self) -> list[Tensor]:
        """As the op or the step computes it; no gradients where steps are in place."""
        way = self.drawn.way
        leaves = [x.detach().requires_grad_(way != "stepped in place") for x in self.inputs]
        q, k, v, *rest = leaves
        options = dict(zip(self.names, rest))
        if self.mask is not None:
            options["key_mask"] = self.mask
        o, state = getattr(self, "_" + way.replace(" ", "_"))(q, k, v, options)
        return self._results(o, state.S, state.z, state.M, leaves if way != "stepped in place" else [])

    def definition(
        self, dtype: torch.dtype, outputs_kept_in: torch.dtype | None = None, off_by: float = 0.0, units: float = 0.0
    ) -> list[Tensor]:
        """As the definition computes it in `dtype`, sequence after sequence. Gradients may be made of outputs that were
        kept in a narrower dtype, and were off by this share of them; features may be off, by up to so many units of theirs."""
        a, leaves = self.drawn, [x.detach().to(dtype, copy=True).requires_grad_() for x in self.inputs]
        q, k, v, *rest = leaves
        options = dict(zip(self.names, rest))
        if self.mask is not None:
            options["key_mask"] = self.mask
            k, v = (torch.where(self.mask[:, None, :, None], x, 0.0) for x in (k, v))
        (fq, q_scale), (fk, k_scale) = self._features(q), self._features(k)
        if units:
            generator = torch.Generator().manual_seed(a.seed)
            fq, fk = (
                x * (1 + units * (2 * torch.rand(x.shape, generator=generator, dtype=dtype) - 1)) for x in (fq, fk)
            )
        if k_scale is not None:
            options["key_log_weight"] = options.get("key_log_weight", 0) + k_scale
        cuts = self.cuts if a.way.startswith("packed") else None
        spans = [slice(i, j) for i, j in zip(cuts, cuts[1:])] if cuts else [slice(None)]
        parts = [(fq[:, :, at], fk[:, :, at], v[:, :, at], part_of(options, at)) for at in spans]
        pieces = [self._define(*part) for part in parts]
        o = torch.cat([piece[0] for piece in pieces], dim=2)
        if outputs_kept_in and a.normalize:
            den = torch.cat([self._denominators(*part) for part in parts], dim=2)
            lost = ((o * (1 + off_by)).to(outputs_kept_in).to(dtype) - o).detach()
            # the same o, whose gradient of den is −o/den with o as kept
            o = o - lost * (den.log() - den.log().detach())
        if q_scale is not None and not a.normalize:
            o = o * q_scale.exp()[..., None]
        state = [torch.cat(parts) for parts in zip(*(piece[1] for piece in pieces))]
        if dtype == torch.float64:
            self.M = state[2].detach()
        return self._results(o, *state, leaves)

    def _features(self, x: Tensor) -> features.Scaled:
        """By the papers' formulas; the random ones' ω, and A of each head, are those of the map."""
        a = self.drawn
        if not a.m:
            return features.elementwise(a.feature_map, x)
        A = getattr(self.feature_map, "A", torch.zeros(1, 1, 1)).double()
        A = A.repeat_interleave(x.shape[1] // len(A), dim=0)
        return features.projected(PAPER_NAMES.get(a.feature_map, a.feature_map), x, self.feature_map.omega, A)

    def _define(self, fq: Tensor, fk: Tensor, v: Tensor, options: dict[str, Tensor]):
        """One sequence a row: (o, (S, z, M))."""
        a = self.drawn
        how = {"normalize": a.normalize, "eps": default_eps(DTYPES[a.dtype])}
        if a.causal:
            return linear_definition.recurrent(fq, fk, v, **how, **options)
        nobody = fk.new_zeros(fk.shape)
        o = linear_definition.quadratic(fq, fk, v, causal=False, **how, **options)
        return o, linear_definition.recurrent(nobody, fk, v, **options)[1]

    def _denominators(self, fq: Tensor, fk: Tensor, v: Tensor, options: dict[str, Tensor]) -> Tensor:
        """Of one sequence a row, in units of its largest log-weight; 1 where there is none."""
        if "key_log_weight" in options and fk.shape[2]:
            w = options["key_log_weight"]
            options = options | {"key_log_weight": w - w.detach().amax(-1, keepdim=True)}
        define = (
            linear_definition.recurrent if self.drawn.causal else partial(linear_definition.quadratic, causal=False)
        )
        found = define(fq, fk, torch.ones_like(v[..., :1]), normalize=False, **options)
        den = found[0] if self.drawn.causal else found
        return torch.where(den == 0, 1.0, den)

    # --- the ways to do it

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Tensor], **more):
        a = self.drawn
        return linear_attention(
            q, k, v, self.feature_map, causal=a.causal, normalize=a.normalize, return_state=True, **options, **more
        )

    def _whole(self, q, k, v, options):
        return self._attend(q, k, v, options)

    def _continued(self, q, k, v, options):
        """A first part, then the rest from its state. Queries that are not causal come last, to see all keys."""
        cut = self.cuts[0]
        first, rest = (q[:, :, :cut], q[:, :, cut:]) if self.drawn.causal else (q[:, :, :0], q)
        pieces, state = [], None
        for part, at in ((first, slice(0, cut)), (rest, slice(cut, None))):
            o, state = self._attend(part, k[:, :, at], v[:, :, at], part_of(options, at), state=state)
            pieces.append(o)
        return torch.cat(pieces, dim=2), state

    def _packed(self, q, k, v, options):
        return self._attend(q, k, v, options, cu_seqlens=torch.tensor(self.cuts, dtype=torch.int32))

    def _packed_continued(self, q, k, v, options):
        """A third of each sequence, then the rest of each from its state."""
        spans = [(i, i + (j - i) // 3, j) for i, j in zip(self.cuts, self.cuts[1:])]
        pieces, indices, state = [], [], None
        for part in (0, 1):
            at = torch.cat([torch.arange(span[part], span[part + 1]) for span in spans])
            cu_seqlens = torch.tensor([0, *(span[part + 1] - span[part] for span in spans)]).cumsum(0).int()
            q_at, k_at, v_at = (x[:, :, at] for x in (q, k, v))
            o, state = self._attend(q_at, k_at, v_at, part_of(options, at), state=state, cu_seqlens=cu_seqlens)
            pieces.append(o)
            indices.append(at)
        return torch.cat(pieces, dim=2)[:, :, torch.cat(indices).argsort()], state

    def _stepped(self, q, k, v, options, inplace=False):
        a, outputs = self.drawn, [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
        log_weights = a.weighted or self.feature_map.log_scaled
        room = {"log_weights": log_weights, "log_features": a.weighted and a.decay == "channel"}
        state = LinearState.zeros(a.b, a.g, a.features, a.e, **room, dtype=wide(q.dtype))
        for i in range(a.s):
            at = slice(i, i + 1)
            o, state = step(
                q[:, :, at],
                k[:, :, at],
                v[:, :, at],
                self.feature_map,
                state,
                normalize=a.normalize,
                inplace=inplace,
                **part_of(options, at),
            )
            outputs.append(o)
        return torch.cat(outputs, dim=2), state

    def _stepped_in_place(self, q, k, v, options):
        return self._stepped(q, k, v, options, inplace=True)


def part_of(options: dict[str, Tensor], at) -> dict[str, Tensor]:
    """The options at positions `at`: decays and log-weights (b, g, s, …), the mask (b, s); a decay a head has no time."""
    return {n: x if x.ndim == 1 else x[:, at] if n == "key_mask" else x[:, :, at] for n, x in options.items()}
