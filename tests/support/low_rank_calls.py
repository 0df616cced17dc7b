"""Calls of the delta rule of low rank: vectors of RWKV-7's kind, and how far a drawn call is from the definition."""

import random

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tarnn.numerics import wide
from tarnn.ops import DeltaState, low_rank_delta_rule
from tarnn.ops.delta.low_rank_definition import low_rank_delta

DECAYS = ["none", "head", "token", "channel"]


def inputs(
    rows=2, h=3, t=37, d=5, e=7, decay="channel", strength=1.0, seed=0, dtype=torch.float64
) -> dict[str, Tensor]:
    """Vectors of RWKV-7's kind: a = −κ̂ and b = κ̂ ⊙ α, so that the state stays bounded."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    direction, keep = normalize(rand(rows, h, t, d), dim=-1), rand(rows, h, t, d).sigmoid()
    made = {"q": rand(rows, h, t, d), "k": rand(rows, h, t, d), "v": rand(rows, h, t, e), "a": -direction}
    made = {name: x.to(dtype) for name, x in (made | {"b": direction * keep}).items()}
    shape = {"none": None, "head": (h,), "token": (rows, h, t), "channel": (rows, h, t, d)}[decay]
    return made if shape is None else made | {"log_decay": (-strength * rand(*shape).abs()).to(wide(dtype))}


def expected(tensors, **options):
    scale = tensors["q"].shape[-1] ** -0.5
    return low_rank_delta(**tensors, **{"scale": scale} | options)


def drawn(seed: int) -> dict:
    """The arguments of a call for `excess`."""
    draw = random.Random(seed)
    return {
        "t": draw.choice([1, 2, 15, 16, 17, 63, 64, 65, 130, 300]),
        "d": draw.randint(1, 40),
        "e": draw.randint(1, 70),
        "h": draw.randint(1, 3),
        "rows": draw.randint(1, 3),
        "decay": draw.choice(DECAYS),
        "strength": draw.choice([0.01, 1.0, 30.0]),
        "masked": draw.random() < 0.5,
        "side_by_side": draw.random() < 0.5,
        "continued": draw.random() < 0.5,
        "seed": seed,
        "dtype": draw.choice(["float64", "float32"]),
    }


def excess(t, d, e, h, rows, decay, strength, masked, side_by_side, continued, seed, dtype) -> float:
    """The largest error of outputs, states and gradients, over twice that of the definition in the same dtype and a rounding."""
    dtype = getattr(torch, dtype)
    exact = inputs(rows, h, t, d, e, decay, strength, seed)
    torch.manual_seed(seed)
    options = {"key_mask": torch.rand(rows, t) > 0.3} if masked else {}
    exact["S"] = torch.randn(rows, h, d, e).double() if continued else torch.zeros(rows, h, d, e).double()
    grads = torch.randn(rows, h, t, e).double(), torch.randn(rows, h, d, e).double()
    if masked:
        grads = grads[0] * options["key_mask"][:, None, :, None], grads[1]

    def definition(kind):
        tensors = {name: x.to(kind).requires_grad_() for name, x in exact.items()}
        results = low_rank_delta(**tensors, **options, scale=d**-0.5)
        return [*results, *torch.autograd.grad(results, tensors.values(), [g.to(kind) for g in grads])]

    def ours():
        tensors = {name: x.to(dtype).requires_grad_() for name, x in exact.items()}
        if side_by_side:
            tensors = {
                name: x
                if name == "S" or x.ndim < 4
                else x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
                for name, x in tensors.items()
            }
        S = tensors.pop("S")
        o, state = low_rank_delta_rule(**tensors, **options, state=DeltaState(S), return_state=True)
        results = torch.autograd.grad([o, state.S], [*tensors.values(), S], [g.to(dtype) for g in grads])
        return [o, state.S, *results]

    right, rounded = definition(torch.float64), definition(dtype)
    largest = max(1.0, *(x.abs().max().item() for x in right if x.numel()))
    most = 0.0
    results = [[x.detach() for x in xs] for xs in (ours(), right, rounded)]
    for x, y, z in zip(*results, strict=True):
        if x.numel():
            least = 1e-12 if dtype == torch.float64 else 4e-6
            most = max(most, float((x - y).abs().max() / (2 * (z - y).abs().max() + least * largest)))
    return most
