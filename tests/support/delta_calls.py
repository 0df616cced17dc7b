"""Small calls of the delta rule and of that of low rank, by name."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from tarnn.numerics import wide
from tarnn.ops.delta.definition import low_rank_delta

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


def low_rank_inputs(
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


def low_rank_defined(tensors, **options):
    scale = tensors["q"].shape[-1] ** -0.5
    return low_rank_delta(**tensors, **{"scale": scale} | options)
