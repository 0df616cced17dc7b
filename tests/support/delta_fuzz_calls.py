"""Drawn calls of the delta rule, each from its number alone: what is asked, how our code is made to do it, and what the
definition says, in any dtype."""

import random
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from support.attention_cases import LENGTHS
from support.fuzz_calls import DTYPES, LAYOUTS, LONG, WIDTHS, laid_out
from tarnn.numerics import wide
from tarnn.ops import DeltaState, delta_rule, delta_step
from tarnn.ops.delta.definition import recurrent

WAYS = ["whole", "continued", "packed", "packed continued", "stepped", "stepped in place"]
KEYS = ["any", "any", "equal", "zero", "alike"]
BETAS = ["one", "two", "any", "any", "ends"]
STEEP = ["mild", "mild", "five", "resets", "huge"]

HEADS = {"queries in groups": (4, 2, 2), "values in groups": (2, 2, 4), "one of each": (2, 2, 2)}
DECAYS = ["none", "head", "token", "channel"]


def inputs(heads="one of each", decay="token", b=2, t=9, d=5, e=3, dtype=torch.float64, seed=0) -> dict[str, Tensor]:
    """The tensors of a small call, by name."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    h, g, m = HEADS[heads]
    n = max(g, m)
    given = {"q": rand(b, h, t, d), "k": rand(b, g, t, d), "v": rand(b, m, t, e), "beta": 2 * rand(b, n, t).sigmoid()}
    shape = {"head": (n,), "token": (b, n, t), "channel": (b, n, t, d)}.get(decay)
    if shape is not None:
        given["log_decay"] = -0.3 * rand(*shape).abs()
    return {name: x.to(dtype) for name, x in given.items()}


@dataclass(frozen=True)
class Drawn:
    """A call in words. q (b, h, t, d), k (b, g, t, d), v (b, m, t, e); n = max(g, m) states."""

    number: int
    seed: int
    b: int
    h: int
    g: int
    m: int
    t: int
    d: int
    e: int
    dtype: str
    way: str
    decay: str
    steep: str  # mild; five: −5 a token, e^160 after 32; resets: some −∞; huge: some −10⁶
    keys: str  # any; equal: some repeat; zero: some are 0; alike: nearly one direction
    betas: str
    norm: float | None
    masked: bool
    junk: str  # what lies at masked tokens: "", "huge", "nan" or "inf"
    with_state: bool
    layouts: tuple[str, ...]  # of q, k, v and the gradient of o
    state_grads: bool  # gradients come back through the state too
    tiny_chunks: bool
    threads: int

    @property
    def n(self) -> int:
        return max(self.g, self.m)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


def draw(seed: int, number: int) -> Drawn:
    """Call `number` of the run with this seed."""
    rng = random.Random(f"delta/{seed}/{number}")
    pick, maybe = rng.choice, lambda p: rng.random() < p
    way, heads, times = pick(["whole"] * 3 + WAYS), pick([1, 2, 3]), pick([1, 1, 2, 3])
    h, g, m = pick([(heads * times, heads, heads), (heads, heads, heads * times)])
    masked = maybe(0.3) and not way.startswith("stepped")
    length = pick(LONG) if maybe(0.1) else pick(LENGTHS)
    return Drawn(
        number,
        rng.getrandbits(31),
        b=1 if way.startswith("packed") else pick([1, 1, 2, 3]),
        h=h,
        g=g,
        m=m,
        t=min(length, 17) if way.startswith("stepped") else length,
        d=pick(WIDTHS),
        e=0 if maybe(0.02) else pick(WIDTHS),
        dtype=pick(["float64", *DTYPES]),
        way=way,
        decay=pick([*DECAYS, "token", "channel"]),
        steep=pick(STEEP),
        keys=pick(KEYS),
        betas=pick(BETAS),
        norm=pick([1e-6, 1e-6, 0.3, None]),
        masked=masked,
        junk=pick(["", "huge", "nan", "inf"]) if masked else "",
        with_state=maybe(0.5),
        layouts=tuple(pick(LAYOUTS) if maybe(0.5) else "contiguous" for _ in range(4)),
        state_grads=maybe(0.5),
        tiny_chunks=maybe(0.4),
        threads=pick([1, 2]),
    )


class Call:
    """The tensors of a drawn call, and two ways to compute it: ours and the definition's.

    Both give [o, S, and the gradients of q, k, v, β, log-decay and the state before], of those that there are.
    """

    def __init__(self, drawn: Drawn):
        self.drawn = a = drawn
        generator = torch.Generator().manual_seed(a.seed)
        rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        rng, dtype = random.Random(a.seed), DTYPES[a.dtype]
        inner = sorted(rng.randint(0, a.t) for _ in range(rng.randint(0, 4)))
        self.cuts = [0, *inner, a.t] if a.way.startswith("packed") else [rng.randint(0, a.t)]
        rows = len(self.cuts) - 1 if a.way.startswith("packed") else a.b
        q, k, v = rand(a.b, a.h, a.t, a.d), self._keys(rand), rand(a.b, a.m, a.t, a.e)
        self.mask = rand(a.b, a.t) > -0.5 if a.masked else None
        junk = {"huge": 1e4, "nan": torch.nan, "inf": torch.inf}
        if self.mask is not None and a.junk:
            k, v = (x.masked_fill(~self.mask[:, None, :, None], junk[a.junk]) for x in (k, v))
        tensors = {n: laid_out(x.to(dtype), how) for n, x, how in zip("qkv", (q, k, v), a.layouts)}
        tensors["beta"] = self._betas(rand).to(wide(dtype))
        if a.decay != "none":
            tensors["log_decay"] = self._decays(rand).to(wide(dtype))
        if a.with_state:
            tensors["state"] = rand(rows, a.n, a.d, a.e).to(wide(dtype))
        self.tensors: dict[str, Tensor] = tensors
        grad_o = laid_out(rand(a.b, max(a.h, a.m), a.t, a.e).to(dtype), a.layouts[3])
        self.grads = [grad_o, *([rand(rows, a.n, a.d, a.e).to(wide(dtype))] if a.state_grads else [])]

    def _keys(self, rand: Callable[..., Tensor]) -> Tensor:
        a = self.drawn
        k = rand(a.b, a.g, a.t, a.d)
        if a.keys == "equal" and a.t:
            k = torch.where(rand(a.b, a.g, a.t, 1) > 0, k[:, :, :1], k)
        if a.keys == "alike" and a.t:
            k = k[:, :, :1] + 0.05 * k
        if a.norm is None:  # |k| at most 1
            k = k / k.norm(dim=-1, keepdim=True).clamp(min=1e-3) * rand(a.b, a.g, a.t, 1).abs().clamp(max=0.98)
        return k.masked_fill(rand(a.b, a.g, a.t, 1) > 0.8, 0.0) if a.keys == "zero" else k

    def _betas(self, rand: Callable[..., Tensor]) -> Tensor:
        a = self.drawn
        beta, other = rand(a.b, a.n, a.t).sigmoid(), rand(a.b, a.n, a.t)
        if a.betas == "ends":
            return torch.where(other > 0.5, 2.0, torch.where(other < -0.5, 0.0, 1.0)).double()
        return beta if a.betas == "one" else 2 * beta

    def _decays(self, rand: Callable[..., Tensor]) -> Tensor:
        a = self.drawn
        shape = {"head": (a.n,), "token": (a.b, a.n, a.t), "channel": (a.b, a.n, a.t, a.d)}[a.decay]
        x, other = -0.3 * rand(*shape).abs(), rand(*shape)
        if a.steep == "five":
            return x - 5
        if a.steep == "resets":
            return x.masked_fill(other > 1.3, -torch.inf)
        return x.masked_fill(other > 1.3, -1e6) if a.steep == "huge" else x

    @property
    def how(self) -> dict:
        return {"normalize_qk": self.drawn.norm or False}

    def nearby(self, seed: int) -> "Call":
        """The same call with each input changed by a unit in its last place, or not: it is as sensitive to rounding."""
        generator, made = torch.Generator().manual_seed(seed), copy(self)

        def changed(x: Tensor) -> Tensor:
            by = torch.randint(-1, 2, x.shape, generator=generator)
            return x * (1 + torch.finfo(x.dtype).eps * by.to(x.dtype))

        made.tensors = {name: changed(x) for name, x in self.tensors.items()}
        made.tensors["beta"] = made.tensors["beta"].clamp(max=2.0)
        return made

    # --- the definition

    def definition(self, dtype: torch.dtype) -> list[Tensor]:
        """All computed in this dtype; the tensors themselves are those of the call."""
        a = self.drawn
        leaves = {n: x.detach().to(dtype).contiguous().requires_grad_() for n, x in self.tensors.items()}
        packed = a.way.startswith("packed")
        spans = [slice(i, j) for i, j in zip(self.cuts, self.cuts[1:])] if packed else [slice(None)]
        outs, states = [], []
        for row, at in enumerate(spans):
            part = _part(leaves, at)
            if packed and "state" in part:
                part["state"] = part["state"][row : row + 1]
            mask = None if self.mask is None else self.mask[:, at]
            o, S = recurrent(**part, scale=a.d**-0.5, norm_eps=a.norm, key_mask=mask)
            outs.append(o)
            states.append(S)
        return self._results(torch.cat(outs, 2), torch.cat(states), list(leaves.values()))

    def _results(self, o: Tensor, S: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        pairs = [(y, g.to(y.dtype)) for y, g in zip((o, S), self.grads) if y.requires_grad]
        grads = [torch.zeros_like(x) for x in leaves]
        if pairs:
            ys, gs = zip(*pairs)
            grads = torch.autograd.grad(ys, leaves, gs, allow_unused=True, materialize_grads=True)
        return [o.detach(), S.detach(), *grads]

    # --- the ways to do it

    def ours(self) -> list[Tensor]:
        """As the op or the step computes it; no gradients where steps are in place."""
        way = self.drawn.way
        leaves = {n: x.detach().requires_grad_(way != "stepped in place") for n, x in self.tensors.items()}
        o, S = getattr(self, "_" + way.replace(" ", "_"))(**leaves)
        return self._results(o, S, list(leaves.values()))

    def _run(self, tensors: dict[str, Tensor], at, **more) -> tuple[Tensor, Tensor]:
        state = tensors.get("state")
        part = _part(tensors, at) | {"state": None if state is None else DeltaState(state)}
        mask = None if self.mask is None else self.mask[:, at]
        o, behind = delta_rule(**part, key_mask=mask, return_state=True, **self.how, **more)
        return o, behind.S

    def _whole(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(tensors, slice(None))

    def _continued(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self.in_two(tensors, self.cuts[0])

    def in_two(self, tensors: dict[str, Tensor], cut: int) -> tuple[Tensor, Tensor]:
        first, S = self._run(tensors, slice(0, cut))
        rest, S = self._run(tensors | {"state": S}, slice(cut, None))
        return torch.cat([first, rest], 2), S

    def _packed(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(tensors, slice(None), cu_seqlens=torch.tensor(self.cuts, dtype=torch.int32))

    def _packed_continued(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        """A third of each sequence, then the rest of each from its state."""
        spans = [(i, i + (j - i) // 3, j) for i, j in zip(self.cuts, self.cuts[1:])]
        pieces, indices = [], []
        for part in (0, 1):
            at = torch.cat([torch.arange(span[part], span[part + 1]) for span in spans])
            cuts = torch.tensor([0, *(span[part + 1] - span[part] for span in spans)]).cumsum(0).int()
            o, S = self._run(tensors, at, cu_seqlens=cuts)
            tensors["state"] = S
            pieces.append(o)
            indices.append(at)
        return torch.cat(pieces, 2)[:, :, torch.cat(indices).argsort()], S

    def _stepped(self, inplace: bool = False, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        a, S = self.drawn, tensors.pop("state", None)
        S = torch.zeros(a.b, a.n, a.d, a.e, dtype=wide(DTYPES[a.dtype])) if S is None else S
        state, outs = DeltaState(S.clone() if inplace else S), [tensors["v"].new_zeros(a.b, max(a.h, a.m), 0, a.e)]
        for i in range(a.t):
            o, state = delta_step(**_part(tensors, slice(i, i + 1)), state=state, inplace=inplace, **self.how)
            outs.append(o)
        return torch.cat(outs, 2), state.S

    def _stepped_in_place(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return self._stepped(inplace=True, **tensors)


def _part(tensors: dict[str, Tensor], at) -> dict[str, Tensor]:
    """The tensors at positions `at`; a decay a head and a state have no time."""
    return {n: x if n == "state" or x.ndim == 1 else x[:, :, at] for n, x in tensors.items()}
