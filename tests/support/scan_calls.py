"""Drawn calls of both scans: how far outputs, states and gradients are from the definition in float64."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from support.scans import Scan, draw
from tarnn.numerics import wide

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 200)
CHANNELS = (1, 3, 8, 15, 16, 17, 33, 64, 65, 130, 260)
NUMBERS = (1, 2, 3, 4, 7, 8, 16, 17)


def drawn(number: int) -> tuple[Scan, Tensor | None]:
    """A call by its number, and the bounds of its sequences: of one type or as models mix them, in any layout, masked (NaN lies
    there), packed, with a state."""
    rng = random.Random(number)
    kind, packed, dtype = rng.choice(["diagonal", "selective"]), rng.random() < 0.3, rng.choice(DTYPES)
    b, t, c, n = 1 if packed else rng.choice((1, 2)), *(rng.choice(x) for x in (LENGTHS, CHANNELS, NUMBERS))
    cuts = [0, *sorted(rng.randint(0, t) for _ in range(rng.randint(0, 3))), t] if packed else None
    scan = draw(kind, b, t, c, n, seed=number, masked=rng.random() < 0.3, skip=rng.random() < 0.5)
    mask = scan.key_mask
    tensors = {
        name: x if mask is None or x.ndim < 3 else x.masked_fill(~mask[..., None], torch.nan)
        for name, x in scan.tensors.items()
    }
    if kind == "diagonal" and rng.random() < 0.3:
        tensors["log_decay"][:, ::7] = rng.choice((0.0, -5.0, -torch.inf))
    mixed = rng.random() < 0.5
    for name, x in tensors.items():
        tensors[name] = laid_out(x.to(dtype if name in "xBC" or not mixed else wide(dtype)), rng)
    rows = len(cuts) - 1 if cuts else b
    h = draw(kind, rows, 1, c, n, seed=number + 1, state=True).h.to(wide(dtype)) if rng.random() < 0.5 else None
    return replace(scan, tensors=tensors, h=h), None if cuts is None else torch.tensor(cuts, dtype=torch.int32)


def laid_out(x: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, perhaps with the last axis apart in memory, or with gaps."""
    match rng.choice(["contiguous", "transposed", "wider"]):
        case "transposed":
            return x.mT.contiguous().mT if x.ndim > 1 else x
        case "wider":
            return torch.nn.functional.pad(x, (1, 2), value=torch.nan)[..., 1:-2]
    return x


def leaves(scan: Scan, dtype: torch.dtype | None = None) -> Scan:
    """Leaves of a graph, in this dtype, or as they are and as they lie."""
    if dtype is None:
        return scan.map(lambda x: x.detach().requires_grad_())
    # the definition's gradients don't bear what stands at masked tokens
    return scan.map(lambda x: x.detach().to(dtype).masked_fill(x.isnan(), 0.0).requires_grad_())


def defined(scan: Scan, cuts: Tensor | None) -> tuple[Tensor, Tensor]:
    """By the definition; sequence after sequence."""
    if cuts is None:
        return scan.exact()
    pieces = []
    for i, (start, stop) in enumerate(zip(cuts.tolist(), cuts[1:].tolist())):
        pieces.append(scan.part(start, stop, None if scan.h is None else scan.h[i : i + 1]).exact())
    return torch.cat([o for o, _ in pieces], 1), torch.cat([h for _, h in pieces])


def excess(number: int) -> float:
    """The largest error over what may be: twice that of the definition computed in the wide dtype and rounded, and a unit in the
    last place. Errors are norms, over the norm of what is right. One naive error may be small by luck: where ours is beyond it,
    the largest of eight more counts, of calls whose inputs differ in the last place."""
    call, cuts = drawn(number)
    dtype = wide(call.tensors["x"].dtype)
    scan, exact = leaves(call), leaves(call, torch.float64)
    results = scan.ours(**({} if cuts is None else {"cu_seqlens": cuts}))
    generator = torch.Generator().manual_seed(number)
    sent = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    ours, right = [*results, *scan.gradients(results, sent).values()], by_definition(exact, cuts, sent)
    allowed = [0.0] * len(ours)
    for nearby in range(9):
        naive = leaves(call, dtype)
        if nearby:
            noise = lambda x: (torch.rand(x.shape, generator=generator) - 0.5) * torch.finfo(dtype).eps  # noqa: E731
            naive = leaves(naive.map(lambda x: x + x.masked_fill(x.isinf(), 0.0) * noise(x)), dtype)  # noqa: B023
        rounded = [x.to(y.dtype) for x, y in zip(by_definition(naive, cuts, sent), ours)]
        allowed = [max(pair) for pair in zip(allowed, map(error, rounded, right))]
        units = [(100 if x.dtype == torch.float64 else 1) * torch.finfo(x.dtype).eps for x in ours]
        worst = max(error(x, y) / (2 * z + unit) for x, y, z, unit in zip(ours, right, allowed, units))
        if worst <= 1:
            break
    return worst


def by_definition(scan: Scan, cuts: Tensor | None, sent: list[Tensor]) -> list[Tensor]:
    """Outputs, states and gradients."""
    results = defined(scan, cuts)
    return [*results, *scan.gradients(results, [g.to(x.dtype) for x, g in zip(results, sent)]).values()]


def error(found: Tensor, right: Tensor) -> float:
    """The norm of the difference, over that of what is right."""
    if not found.isfinite().all() or found.shape != right.shape:
        return torch.inf
    return (found.double() - right).norm().item() / (right.norm().item() or 1.0)
