"""Drawn calls of the delta rule, the definition of each in a dtype, and how far the compiled kernels are from it."""

import random

import torch
from torch import Tensor

from tarnn.kernels.cpu import delta as compiled
from tarnn.kernels.delta import IN_TIME, Call, Gradients
from tarnn.numerics import wide
from tarnn.ops.delta import definition
from tarnn.ops.delta.op import compute

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LENGTHS = [0, 1, 2, 3, 17, 31, 33, 63, 64, 65, 130, 257, 290, 514]
WIDTHS = [1, 3, 7, 8, 16, 17, 31, 40, 64]


def drawn(number: int, dtype: str | None = None) -> Call:
    """A call by its number: heads in either kind of group, packed or not, with or without decays, masks
    (NaN lies there), a state."""
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    narrow = DTYPES[dtype or rng.choice(list(DTYPES))]
    t, d, e, g, shared = (
        rng.choice(LENGTHS),
        rng.choice(WIDTHS),
        rng.choice(WIDTHS),
        rng.choice([1, 2]),
        rng.choice([1, 2, 3]),
    )
    h, m = rng.choice([(g, g * shared), (g * shared, g)])
    packed, kind, norm_eps = (
        rng.random() < 0.25,
        rng.choice(["none", "token", "channel"]),
        rng.choice([None, 1e-6, 0.1]),
    )
    b, n = 1 if packed else rng.choice([1, 2]), max(g, m)
    cuts = sorted(rng.randint(0, t) for _ in range(rng.randint(0, 3)))
    q, v, k = rand(b, h, t, d), rand(b, m, t, e), rand(b, g, t, d) * (1 if norm_eps else d**-0.5)
    decay = -rand(b, n, t, d).abs() * rng.choice([0.01, 0.1, 1, 5, 20])
    if rng.random() < 0.2:
        decay.masked_fill_(rand(b, n, t, d) > 1.5, -torch.inf)
    if rng.random() < 0.2:
        k = k[:, :, :1].expand(k.shape)  # equal keys
    mask = rand(b, t) > -0.5 if rng.random() < 0.3 else None
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    return Call(
        *[_laid_out(x.to(narrow), rng) for x in (q, k, v)],
        2 * rand(b, n, t).sigmoid().to(wide(narrow)),
        None if kind == "none" else (decay if kind == "channel" else decay[..., 0]).to(wide(narrow)),
        rand(len(cuts) + 1 if packed else b, n, d, e).to(wide(narrow)) if rng.random() < 0.5 else None,
        mask,
        torch.tensor([0, *cuts, t], dtype=torch.int32) if packed else None,
        d**-0.5,
        norm_eps,
    )


def _laid_out(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, perhaps as a projection's output has them, or with gaps."""
    match rng.choice(["contiguous", "as projected", "wider", "transposed"]):
        case "as projected":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        case "wider":
            return torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]
        case "transposed":
            return x.mT.contiguous().mT
    return x


def defined(call: Call, dtype: torch.dtype) -> list[Tensor]:
    """o and S by the definition, each sequence on its own."""
    call = call._replace(
        **{name: x.to(dtype) for name, x in call._asdict().items() if name in (*IN_TIME, "S") and x is not None}
    )
    cuts = call.cuts()
    if cuts is None:
        return list(_sequence(call))
    pieces = []
    for i, (begin, end) in enumerate(zip(cuts, cuts[1:])):
        of_time = {name: x[:, :, begin:end] for name in IN_TIME if (x := getattr(call, name)) is not None}
        mask = None if call.key_mask is None else call.key_mask[:, begin:end]
        S = None if call.S is None else call.S[i : i + 1]
        pieces.append(_sequence(call._replace(**of_time, key_mask=mask, S=S)))
    return [torch.cat([o for o, _ in pieces], 2), torch.cat([S for _, S in pieces])]


def _sequence(call: Call) -> tuple[Tensor, Tensor]:
    options = {"log_decay": call.log_decay, "norm_eps": call.norm_eps, "key_mask": call.key_mask, "state": call.S}
    return definition.recurrent(call.q, call.k, call.v, call.beta, scale=call.scale, **options)


def differences(results: list[Tensor], expected: list[Tensor], scales: list[float]) -> list[float]:
    """Of each result the largest difference, over its scale."""
    pairs = [(x.double() - y).abs() for x, y in zip(results, expected)]
    return [x.max().item() / scale if x.numel() else 0.0 for x, scale in zip(pairs, scales)]


def excess(call: Call) -> float:
    """The largest error of o and S by the compiled kernels, over what may be: twice the error of the definition in the call's
    dtype, and two units in the last place (float64, which is what they are compared with: 50)."""
    outputs, expected = compiled.forward(call), defined(call, torch.float64)
    naive = lambda call: defined(call, wide(call.q.dtype))  # noqa: E731
    return _largest_excess(call, [outputs.o, outputs.S], naive, expected, [_largest([x]) for x in expected])


def excess_of_gradients(call: Call) -> float:
    """As `excess`, of all gradients, measured by the largest number of any."""
    generator = torch.Generator().manual_seed(1)
    outputs = compiled.forward(call)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs[:2]]
    results = compiled.backward(call, compute.returned(*grads, None, None, outputs.kept))
    expected = gradients(call, torch.float64, grads)
    naive = lambda call: gradients(call, wide(call.q.dtype), grads)  # noqa: E731
    ours = [getattr(results, name) for name, x in zip(Gradients._fields, call) if x is not None]
    return _largest_excess(call, ours, naive, expected, [_largest(expected)] * len(ours))


def gradients(call: Call, dtype: torch.dtype, grads: list[Tensor]) -> list[Tensor]:
    """Those of the definition in this dtype, for what comes back to o and S."""
    given = dict(zip(call._fields, call[: len(Gradients._fields)]))
    leaves = {name: x.to(dtype).requires_grad_() for name, x in given.items() if x is not None}
    pairs = [(y, g.to(dtype)) for y, g in zip(defined(call._replace(**leaves), dtype), grads) if y.requires_grad]
    if not pairs:  # no tokens, and no state before them
        return [torch.zeros_like(x) for x in leaves.values()]
    outputs, grads = zip(*pairs)
    return list(torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True, materialize_grads=True))


def _largest(xs: list[Tensor]) -> float:
    return max((x.abs().max().item() for x in xs if x.numel()), default=0.0) or 1.0


def _largest_excess(call: Call, ours: list[Tensor], naive, expected: list[Tensor], scales: list[float]) -> float:
    """One naive error may be small by luck: where ours is beyond it, the largest of eight more counts, of calls whose inputs
    differ in the last place."""
    errors, allowed = differences(ours, expected, scales), [0.0] * len(ours)
    for seed in range(9):
        rounded = [x.to(y.dtype) for x, y in zip(naive(nearby(call, seed)), ours)]
        allowed = [max(pair) for pair in zip(allowed, differences(rounded, expected, scales))]
        units = [(50 if x.dtype == torch.float64 else 2) * torch.finfo(x.dtype).eps for x in ours]
        worst = max((x / (2 * y + unit) for x, y, unit in zip(errors, allowed, units)), default=0.0)
        if worst <= 1:
            break
    return worst


def nearby(call: Call, seed: int) -> Call:
    """This call, or, by another seed than 0, with q, k and v changed by a unit in float32's last place, or not."""
    generator = torch.Generator().manual_seed(seed)
    by = [torch.randint(-1, 2, x.shape, generator=generator) * torch.finfo(torch.float32).eps for x in call[:3]]
    changed = [x.to(wide(x.dtype)) * (1 + i) for x, i in zip(call[:3], by)]
    return call._replace(**dict(zip(IN_TIME, changed))) if seed and call.q.dtype != torch.float64 else call
