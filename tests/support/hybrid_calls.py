"""Drawn calls of hybrid attention: how far outputs, far shares and gradients are from the definition in float64."""

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import tarnn
from support.scan_calls import laid_out
from tarnn.numerics import wide
from tarnn.ops.features import features, log_features
from tarnn.ops.hybrid import definition
from tarnn.ops.hybrid.op import hybrid_attention
from tarnn.ops.hybrid.slots import scores

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 5, 31, 63, 64, 65, 130, 200)
SIZES = (1, 3, 4, 8, 16, 17, 32, 64, 72)
WINDOWS = (1, 2, 7, 31, 64, 65, 128, 300)


@dataclass(frozen=True)
class Hybrid:
    """A call: its tensors with gradients, and all else."""

    tensors: dict[str, Tensor]  # q, k, v, far_bias, maybe log_decay
    phi: nn.Module | None
    options: dict[str, Any]
    cuts: list[int] | None  # bounds of packed sequences
    prefix: int | None  # so many tokens come in a call of their own, whose state the other one continues

    def leaves(self, dtype: torch.dtype | None = None) -> "Hybrid":
        """With leaves of a graph, as they are; or in this dtype, with zeros at masked tokens, as the definition needs them."""
        tensors = {
            name: x.detach() if dtype is None else x.detach().to(dtype).nan_to_num(nan=0.0)
            for name, x in self.tensors.items()
        }
        return replace(self, tensors={name: x.requires_grad_() for name, x in tensors.items()})

    def ours(self) -> list[Tensor]:
        if self.prefix is None:
            cuts = None if self.cuts is None else torch.tensor(self.cuts, dtype=torch.int32)
            tensors, phi = self.tensors, self.phi
            return list(
                hybrid_attention(feature_map=phi, cu_seqlens=cuts, return_far_share=True, **tensors, **self.options)
            )
        first, second = self.part(0, self.prefix), self.part(self.prefix, None)
        o, state, share = hybrid_attention(
            feature_map=self.phi, return_state=True, return_far_share=True, **first.tensors, **first.options
        )
        rest, rest_share = hybrid_attention(
            feature_map=self.phi, state=state, return_far_share=True, **second.tensors, **second.options
        )
        return [torch.cat([o, rest], 2), torch.cat([share, rest_share], 2)]

    def defined(self) -> list[Tensor]:
        """Sequence after sequence."""
        if self.cuts is None:
            return self._defined()
        parts = [self.part(start, stop)._defined() for start, stop in pairwise(self.cuts) if start < stop]
        return [torch.cat(x, 2) for x in zip(*parts)]

    def part(self, start: int, stop: int | None) -> "Hybrid":
        """Of tokens start … stop."""
        tensors = {name: x if name == "far_bias" else x[:, :, start:stop] for name, x in self.tensors.items()}
        masks = {name: self.options.get(name) for name in ("key_mask", "global_tokens")}
        masks = {name: x[:, start:stop] for name, x in masks.items() if x is not None}
        return replace(self, tensors=tensors, options=self.options | masks, cuts=None)

    def _defined(self) -> list[Tensor]:
        tensors, options = dict(self.tensors), dict(self.options)
        far_bias, k = tensors.pop("far_bias"), tensors["k"]
        scale, softcap = options.pop("scale"), options["softcap"]
        score = scores(self.phi, k, scale, softcap) if options["slots"] else None
        far = None if self.phi is None else self._far_weight(tensors["q"], k) + far_bias[None, :, None, None]
        return list(definition.hybrid(**tensors, far_weight=far, scale=scale, score=score, **options))

    def _far_weight(self, q: Tensor, k: Tensor) -> Tensor:
        """log φ(q_i)·φ(k_j), (b, h, t, t)."""
        r = q.shape[1] // k.shape[1]
        if self.phi.log_features:
            queries, keys = (
                log_features(self.phi, q, "queries"),
                log_features(self.phi, k, "keys").repeat_interleave(r, 1),
            )
            return (queries[:, :, :, None] + keys[:, :, None]).logsumexp(-1)
        (queries, a), (keys, b) = features(self.phi, q, "queries"), features(self.phi, k, "keys")
        log = (queries @ keys.repeat_interleave(r, 1).mT).log()
        for scale in (
            None if a is None else a[..., None],
            None if b is None else b.repeat_interleave(r, 1)[:, :, None],
        ):
            log = log if scale is None else log + scale
        return log

    def gradients(self, o: Tensor, sent: Tensor) -> list[Tensor]:
        given = list(self.tensors.values())
        found = torch.autograd.grad(o, given, sent, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(given, found)]


def drawn(number: int) -> Hybrid:
    """A call by its number: causal or not, in any layout, masked (NaN lies there), packed, in two calls."""
    rng, draw = random.Random(number), torch.Generator().manual_seed(number)
    dtype, causal, packed = rng.choice(DTYPES), rng.random() < 0.5, rng.random() < 0.3
    b, g, r, t = 1 if packed else rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 1, 2, 3)), rng.choice(LENGTHS)
    d, e = rng.choice(SIZES), rng.choice(SIZES)
    tensors = {
        name: torch.randn(b, n, t, size, generator=draw)
        for name, n, size in (("q", g * r, d), ("k", g, d), ("v", g, e))
    }
    mask = torch.rand(b, t, generator=draw) > 0.3 if rng.random() < 0.4 else None
    if mask is not None:
        tensors = {name: x.masked_fill(~mask[:, None, :, None], torch.nan) for name, x in tensors.items()}
    tensors = {name: laid_out(x.to(dtype), rng) for name, x in tensors.items()}
    tensors["far_bias"] = torch.randn(g * r, generator=draw).to(wide(dtype))
    options: dict[str, Any] = {
        "causal": causal,
        "window": rng.choice(WINDOWS),
        "sinks": rng.choice((0, 0, 1, 3, 70)),
        # which keys stand in slots may hang on a rounding, and then all of the rest does
        "slots": rng.choice((0, 0, 1, 5)) if dtype == torch.float64 else 0,
        "scale": rng.choice((d**-0.5, 0.2)),
        "softcap": rng.choice((None, None, 2.0)),
        "key_mask": mask,
    }
    if causal and rng.random() < 0.4:
        tensors["log_decay"] = -torch.rand(b, g, t, generator=draw).to(wide(dtype)) * rng.choice((0.01, 1.0))
    if not causal and rng.random() < 0.5:
        options["global_tokens"] = torch.rand(b, t, generator=draw) > rng.choice((0.95, 0.5))
    prefix = rng.randrange(t + 1) if causal and not packed and rng.random() < 0.4 else None
    if prefix is None and rng.random() < 0.2:
        options["exact_queries"] = torch.tensor(sorted({rng.randrange(t) for _ in range(3)}))
    kind = rng.choice(("none", "favor", "favor", "elu", "exp"))
    phi: nn.Module | None = (
        tarnn.PositiveRandomFeatures(d, rng.choice((4, 16, 40)), seed=number) if kind == "favor" else None
    )
    phi = {"elu": tarnn.Elu(), "exp": tarnn.feature_maps.Exp()}.get(kind, phi)
    cuts = [0, *sorted(rng.randint(0, t) for _ in range(rng.randint(0, 3))), t] if packed else None
    return Hybrid(tensors, phi, options, cuts, prefix)


def excess(number: int) -> float:
    """The largest error over what may be: twice that of the definition computed in the wide dtype and rounded, and a unit in the
    last place; 3 √e units more for gradients, since that of a weight is the difference of two sums of e products. Errors are
    norms, over the norm of what is right (of gradients: of all of them). One naive error may be small by luck: where ours is
    beyond it, the largest of eight more counts, of calls whose inputs differ in the last place."""
    call = drawn(number)
    dtype, e = wide(call.tensors["q"].dtype), call.tensors["v"].shape[-1]
    watched, exact = call.leaves(), call.leaves(torch.float64)
    results = watched.ours()
    generator = torch.Generator().manual_seed(number)
    sent = torch.randn(results[0].shape, generator=generator).to(results[0].dtype)
    ours, right = [*results, *watched.gradients(results[0], sent)], by_definition(exact, sent)
    allowed = [0.0] * len(ours)
    for nearby in range(9):
        naive = call.leaves(dtype)
        if nearby:
            changed = {
                name: x * (1 + (torch.rand(x.shape, generator=generator) - 0.5) * torch.finfo(dtype).eps)
                for name, x in naive.tensors.items()
            }
            naive = replace(naive, tensors=changed).leaves(dtype)
        rounded = [x.to(y.dtype) for x, y in zip(by_definition(naive, sent), ours)]
        allowed = [max(pair) for pair in zip(allowed, errors(rounded, right))]
        units = [(1000 if x.dtype == torch.float64 else 1) * torch.finfo(x.dtype).eps for x in ours]
        units = [unit * (1 if i < 2 else 1 + 3 * e**0.5) for i, unit in enumerate(units)]
        worst = max(mine / (2 * naive + unit) for mine, naive, unit in zip(errors(ours, right), allowed, units))
        if worst <= 1:
            break
    return worst


def by_definition(call: Hybrid, sent: Tensor) -> list[Tensor]:
    """Output, far share and gradients."""
    results = call.defined()
    return [*results, *call.gradients(results[0], sent.to(results[0].dtype))]


def errors(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """The norms of differences, over those of what is right; of the gradients, behind the two outputs, over that of all."""
    norms = [x.norm().item() for x in right]
    whole = math.hypot(*norms[2:])
    sizes = [norms[0], max(norms[1], 1e-3), *[whole] * (len(right) - 2)]
    return [
        (x.double() - y).norm().item() / (size or 1.0) if x.isfinite().all() else math.inf
        for x, y, size in zip(found, right, sizes)
    ]
