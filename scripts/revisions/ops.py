"""Drawn calls of every op, through the names that users have: outputs, states and gradients, or the refusal."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tarnn
from tarnn.feature_maps import make

SEEDED = {"num_features": 24, "seed": 1}
MAPS: dict[str, dict[str, Any]] = {
    "clusters": {"num_features": 8, "seed": 1},
    "cosformer": {"max_length": 512},
    "dpfp": {},
    "elu": {},
    "exp": {},
    "favor": SEEDED,
    "gaussian": SEEDED,
    "generalized_random": SEEDED,
    "hedgehog": {},
    "hyperbolic": SEEDED,
    "identity": {},
    "oprf": SEEDED,
    "polynomial2": {},
    "relu": {},
    "saderf": SEEDED,
    "squared_relu": {},
    "taylor": {},
    "trigonometric": SEEDED,
}
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
DECAYS = [None, None, "head", "token", "channel"]
Found = dict[str, Any]


def compute(number: int, folder: Path) -> Found:
    del folder
    found: Found = {}
    for name, call in CALLS.items():
        for i in range(number):
            draw = random.Random(f"{name} {i}")
            torch.manual_seed(draw.randrange(2**31))
            try:
                parts = call(draw)
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                found[f"{name} {i}: refused"] = f"{type(error).__name__}: {error}"
                continue
            found |= {f"{name} {i}: {part}": x.detach().clone() for part, x in parts.items()}
    return found


class Drawn:
    """Sizes, a map and inputs of one call."""

    def __init__(self, draw: random.Random, *, t: int | None = None):
        self.draw = draw
        self.b, self.g = draw.choice([1, 1, 2, 3]), draw.choice([1, 2])
        self.h, self.d = self.g * draw.choice([1, 1, 2]), draw.choice([4, 8, 16, 24, 32, 64])
        self.e = draw.choice([self.d, self.d, 5, 16])
        self.t = draw.choice([1, 3, 17, 64, 65, 130, 300]) if t is None else t
        self.dtype = draw.choice(DTYPES)
        self.causal = draw.random() < 0.7

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def qkv(self) -> list[Tensor]:
        return [
            self.normal(self.b, self.h, self.t, self.d),
            self.normal(self.b, self.g, self.t, self.d),
            self.normal(self.b, self.g, self.t, self.e),
        ]

    def map(self, names=tuple(MAPS)):
        name = self.draw.choice(names)
        phi = make(name, head_dim=self.d, num_heads=self.g, **MAPS[name]).to(self.dtype).requires_grad_(False)
        return phi.at(torch.arange(self.t)) if name == "cosformer" else phi

    def log_decay(self, phi) -> Tensor | None:
        kind = self.draw.choice(DECAYS)
        if kind is None or not self.causal:
            return None
        row = (self.b, self.g, self.t)
        shapes = {"head": (self.g,), "token": row, "channel": (*row, phi.num_features(self.d))}
        return -torch.rand(shapes[kind]) * 0.2

    def key_mask(self) -> Tensor | None:
        return torch.rand(self.b, self.t) > 0.3 if self.draw.random() < 0.3 else None

    def cuts(self) -> Tensor | None:
        if self.b > 1 or self.t < 4 or self.draw.random() < 0.7:
            return None
        inner = sorted(self.draw.sample(range(1, self.t), 2))
        return torch.tensor([0, *inner, self.t])


def with_gradients(draw: random.Random, inputs: list[Tensor], compute) -> dict[str, Tensor]:
    """The outputs, and of half of the calls the inputs' gradients."""
    backward = draw.random() < 0.5
    inputs = [x.requires_grad_(backward) for x in inputs]
    parts = named(compute(*inputs))
    if backward:
        o = parts["o"]
        grads = torch.autograd.grad(o, inputs, torch.randn(o.shape).to(o.dtype), allow_unused=True)
        parts |= {f"grad {i}": x for i, x in enumerate(grads) if x is not None}
    return parts


def named(result) -> dict[str, Tensor]:
    """Of o, or (o, state): o and what the state holds."""
    o, *states = result if isinstance(result, tuple) else (result,)
    parts = {"o": o}
    for state in states:
        parts |= {f"state {k}": x for k, x in state.tensors().items()}
    return parts


def linear(draw: random.Random) -> dict[str, Tensor]:
    x = Drawn(draw)
    phi = x.map()
    options: dict[str, Any] = {
        "causal": x.causal,
        "log_decay": x.log_decay(phi),
        "normalize": phi.positive and draw.random() < 0.8,
    }
    if (cuts := x.cuts()) is not None:
        options["cu_seqlens"] = cuts
    elif (mask := x.key_mask()) is not None:
        options["key_mask"] = mask
    if x.causal and draw.random() < 0.3:
        options["return_state"] = True
    return with_gradients(draw, x.qkv(), lambda q, k, v: tarnn.linear_attention(q, k, v, phi, **options))


def softmax(draw: random.Random) -> dict[str, Tensor]:
    x = Drawn(draw)
    options: dict[str, Any] = {"causal": x.causal}
    if (cuts := x.cuts()) is not None:
        options["cu_seqlens"] = cuts
    elif (mask := x.key_mask()) is not None:
        options["key_mask"] = mask
    if x.causal and draw.random() < 0.3:
        options["return_state"] = True
    return with_gradients(draw, x.qkv(), lambda q, k, v: tarnn.softmax_attention(q, k, v, **options))


def hybrid(draw: random.Random) -> dict[str, Tensor]:
    x = Drawn(draw)
    options: dict[str, Any] = {
        "causal": x.causal,
        "window": draw.choice([1, 4, 16, 64]),
        "sinks": draw.choice([0, 0, 2, 4]),
        "slots": draw.choice([0, 0, 3]),
    }
    if draw.random() < 0.2:
        options["softcap"] = 20.0
    if draw.random() < 0.3:
        options["far_bias"] = 0.3
    if (cuts := x.cuts()) is not None:
        options["cu_seqlens"] = cuts
    elif (mask := x.key_mask()) is not None:
        options["key_mask"] = mask
    if x.causal and draw.random() < 0.3:
        options["return_state"] = True
    phi = None if draw.random() < 0.2 else x.map(("clusters", "favor", "hedgehog", "clusters"))
    return with_gradients(draw, x.qkv(), lambda q, k, v: tarnn.ops.hybrid_attention(q, k, v, phi, **options))


def step(draw: random.Random) -> dict[str, Tensor]:
    x, state, parts = Drawn(draw, t=1), None, {}
    phi = x.map()
    normalize = phi.positive and draw.random() < 0.8
    for i in range(draw.choice([2, 5])):
        o, state = tarnn.step(*x.qkv(), phi, state, normalize=normalize, inplace=bool(state) and draw.random() < 0.5)
        parts |= {f"{i} {part}": y.clone() for part, y in named((o, state)).items()}
    return parts


def softmax_step(draw: random.Random) -> dict[str, Tensor]:
    x = Drawn(draw)
    state = tarnn.KVCache.empty(x.b, x.g, x.t + 3, x.d, x.e, dtype=x.dtype)
    o, state = tarnn.softmax_attention(*x.qkv(), causal=True, state=state, return_state=True)
    parts = named((o, state))
    x.t = 1
    for i in range(3):
        o, state = tarnn.ops.softmax_step(*x.qkv(), state)
        parts[f"{i} o"] = o
    return parts


def hybrid_step(draw: random.Random) -> dict[str, Tensor]:
    x, window = Drawn(draw), draw.choice([1, 4, 16])
    phi = None if draw.random() < 0.2 else x.map(("clusters", "favor", "hedgehog"))
    options: dict[str, Any] = {"window": window, "sinks": draw.choice([0, 2]), "slots": draw.choice([0, 3])}
    x.causal = True
    o, state = tarnn.ops.hybrid_attention(*x.qkv(), phi, causal=True, return_state=True, **options)
    parts = named((o, state))
    x.t = 1
    for i in range(3):
        o, state = tarnn.ops.hybrid_step(*x.qkv(), phi, state, **options)
        parts[f"{i} o"] = o
    return parts


def elementwise(draw: random.Random) -> dict[str, Tensor]:
    from tarnn.ops.elementwise import rms_norm, swiglu

    dtype, n = draw.choice(DTYPES), draw.choice([1, 7, 32, 129, 512])
    a = torch.randn(draw.choice([1, 3, 40]), n).to(dtype)
    if draw.random() < 0.5:
        return with_gradients(draw, [a, torch.randn(n).to(dtype)], lambda y, w: rms_norm(y, w, 1e-6))
    return with_gradients(draw, [a, torch.randn(a.shape).to(dtype)], swiglu)


def classes(draw: random.Random) -> dict[str, Tensor]:
    d = draw.choice([8, 16])
    phi = make("favor", head_dim=d, num_features=32, seed=3)
    weight, x = torch.randn(50, d), torch.randn(7, d)
    sums = tarnn.ops.sum_classes(weight, phi)
    return tarnn.ops.random_feature_softmax(x, weight[:9], phi, sums)._asdict()


CALLS = {
    "linear": linear,
    "softmax": softmax,
    "hybrid": hybrid,
    "step": step,
    "softmax step": softmax_step,
    "hybrid step": hybrid_step,
    "elementwise": elementwise,
    "classes": classes,
}
