"""The definition of the instructions that look at one token at a time; `definition` has the whole of it.

Each is a function of a `Call` and its inputs (n, heads, width), for n tokens of any rows, to its outputs (n, heads, width).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tarnn.numerics import widest
from tarnn.program.instructions import Instruction

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Tokens:
    """All tokens of all rows behind one another: ids (n,), positions (n,), what `embed` adds (n, width)."""

    ids: Tensor
    positions: Tensor
    extra: Tensor | None
    lengths: list[int]
    dtype: torch.dtype

    @classmethod
    def of(cls, ids, positions, extra, dtype) -> "Tokens":
        places = [torch.arange(p, p + len(x), device=x.device) for p, x in zip(positions, ids, strict=True)]
        added = None if extra is None else torch.cat(list(extra)).to(dtype)
        return cls(torch.cat(list(ids)), torch.cat(places), added, [len(x) for x in ids], dtype)


@dataclass(frozen=True)
class Call:
    """One instruction for some tokens."""

    instruction: Instruction
    tokens: Tokens

    def weight(self, name: str) -> Tensor | None:
        """Return a weight in the dtype of the computation; None where the instruction has none of this role."""
        x = self.instruction.weights.get(name)
        return None if x is None else x.to(self.tokens.ids.device, self.tokens.dtype)

    def weights(self, *names: str) -> list[Tensor]:
        """Return weights that the instruction must have."""
        return [self.instruction.weights[name].to(self.tokens.ids.device, self.tokens.dtype) for name in names]

    def number(self, name: str, default: float = 0.0) -> float:
        return float(cast(float, self.instruction.numbers.get(name, default)))

    def option(self, name: str, more: Sequence[Tensor], default: Tensor | None = None) -> Any:
        """Return the input whose place stands under `name`; more: those behind q, k and v."""
        return more[int(self.number(name)) - 3] if name in self.instruction.numbers else default


def embed(call: Call) -> Outputs:
    n, width = len(call.tokens.ids), call.instruction.outputs[0].size
    x = torch.zeros(n, width, dtype=call.tokens.dtype, device=call.tokens.ids.device)
    table, places = call.instruction.weights["tokens"], call.instruction.weights.get("places")
    x[:, : table.shape[1]] += table.to(x.device)[call.tokens.ids].to(x.dtype) * call.number("scale", 1.0)
    if places is not None:
        x[:, width - places.shape[1] :] += places.to(x.device)[call.tokens.positions].to(x.dtype)
    return (x if call.tokens.extra is None else x + call.tokens.extra,)


def product(call: Call, x: Tensor) -> Outputs:
    return (F.linear(x.flatten(1), call.weights("weight")[0].flatten(0, -2), call.weight("bias")),)


def head(call: Call, x: Tensor) -> Outputs:
    (y,), cap = product(call, x), call.number("softcap")
    return (cap * (y / cap).tanh() if cap else y,)


def concat(call: Call, *parts: Tensor) -> Outputs:
    return (torch.cat(parts, -1),)


def head_product(call: Call, x: Tensor) -> Outputs:
    (weight,), bias = call.weights("weight"), call.weight("bias")
    y = (weight @ x[..., None])[..., 0]  # (n, h, o)
    return (y if bias is None else y + bias,)


def add(call: Call, a: Tensor, *b: Tensor) -> Outputs:
    return (a + other(call, a, *b),)


def mul(call: Call, a: Tensor, *b: Tensor) -> Outputs:
    return (a * other(call, a, *b),)


def other(call: Call, a: Tensor, b: Tensor | None = None) -> Tensor | float:
    """Return the second operand, so that it broadcasts against a: of its shape, one per head, one, a weight, a number."""
    if b is not None:
        return b.reshape(a.shape) if b.shape[1:].numel() == a.shape[1:].numel() else b.flatten(1)[..., None]
    weight = call.weight("weight")
    if weight is None:
        return call.number("number")
    return weight.reshape(a.shape[1:]) if weight.numel() == a.shape[1:].numel() else weight


def norm(call: Call, x: Tensor) -> Outputs:
    kind, eps, gain, bias = (
        call.instruction.numbers["kind"],
        call.number("eps"),
        call.weight("gain"),
        call.weight("bias"),
    )
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    square = x.square().mean(-1, keepdim=True) if kind in ("rms", "layer") else x.square().sum(-1, keepdim=True)
    x = x / (square.sqrt().clamp(min=eps) if kind == "length" else (square + eps).sqrt())
    x = x if gain is None else x * gain.reshape(-1, x.shape[-1])
    return (x if bias is None else x + bias.reshape(-1, x.shape[-1]),)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,  # x above 20
    "exp": torch.exp,
    "neg": torch.neg,
    "log_sigmoid": F.logsigmoid,
}


def apply(call: Call, x: Tensor) -> Outputs:
    return (FUNCTIONS[str(call.instruction.numbers["function"])](x),)


def clamp(call: Call, x: Tensor) -> Outputs:
    return (x.clamp(call.number("least"), call.number("most")),)


def rotate(call: Call, x: Tensor) -> Outputs:
    frequencies = call.instruction.weights["frequencies"].to(x.device)
    wide = widest(x.device)
    angles = call.tokens.positions[:, None].to(wide) * frequencies.to(wide)
    angles = angles.to(frequencies.dtype).to(wide)[:, None]  # (n, 1, p)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    p = len(frequencies)
    if call.instruction.numbers["interleaved"]:
        first, second = x[..., 0 : 2 * p : 2], x[..., 1 : 2 * p : 2]
    else:
        first, second = x[..., :p], x[..., p : 2 * p]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin])
    pairs = turned.movedim(0, -1) if call.instruction.numbers["interleaved"] else turned.movedim(0, -2)
    return (torch.cat([pairs.flatten(-2), x[..., 2 * p :]], -1),)


def features(call: Call, x: Tensor) -> Outputs:
    """φ of each head, and the logarithm of what it is to be multiplied with."""
    function, logarithm = str(call.instruction.numbers["function"]), x.new_zeros(*x.shape[:2], 1)
    if "centre" in call.instruction.weights:
        centre, stretch, weight = (of_heads(w, x.shape[1]) for w in call.weights("centre", "stretch", "weight"))
        constant = of_heads(call.weights("constant")[0], x.shape[1])
        logarithm = ((weight * x).sum(-1) + constant)[..., None]
        x = (x - centre) * stretch
    constant = call.number("offset") - call.number("square") * x.square().sum(-1, keepdim=True)
    u, omega, bias = x, call.weight("omega"), call.weight("bias")
    if omega is not None:
        u = (of_heads(omega, x.shape[1]) @ x[..., None])[..., 0]
        u = u if bias is None else u + of_heads(bias, x.shape[1])
    gain, shift = call.number("gain", 1.0), call.number("shift")
    if function == "exp":
        largest = (u + constant).amax(-1, keepdim=True).clamp(min=call.number("number", float("-inf")))
        return gain * (u + constant - largest).exp() + shift * (-largest).exp(), logarithm + largest
    if function == "waves":
        return gain * torch.cat([u.sin(), u.cos()], -1), logarithm + constant
    return gain * FEATURES[function](call, u + constant) + shift, logarithm


def of_heads(weight: Tensor, heads: int) -> Tensor:
    """Repeat weights of some heads for as many: neighbours share them."""
    return weight.repeat_interleave(heads // len(weight), 0)


def dpfp(call: Call, u: Tensor) -> Tensor:
    r = torch.cat([u.relu(), (-u).relu()], -1)
    return torch.cat([r * r.roll(j, -1) for j in range(1, int(call.number("number")) + 1)], -1)


def pairs(call: Call, u: Tensor) -> Tensor:
    leads, line, square, pair, behind, ends = cast(tuple[float, ...], call.instruction.numbers["parts"])
    i, j = torch.triu_indices(u.shape[-1], u.shape[-1], 1, device=u.device)
    one = torch.ones_like(u[..., :1])
    parts = [(leads, one), (line, u), (square, u.square()), (pair, u[..., i] * u[..., j]), (behind, u), (ends, one)]
    return torch.cat([factor * x for k, (factor, x) in enumerate(parts) if factor or k in (2, 3)], -1)


def cosformer(call: Call, u: Tensor) -> Tensor:
    angle = (call.tokens.positions.to(widest(u.device)) * call.number("number"))[:, None, None]
    return torch.cat([u.relu() * angle.cos().to(u.dtype), u.relu() * angle.sin().to(u.dtype)], -1)


def elementwise(name: str) -> Callable[[Call, Tensor], Tensor]:
    return lambda _, u: FUNCTIONS[name](u)


FEATURES: dict[str, Callable[[Call, Tensor], Tensor]] = {
    **{name: elementwise(name) for name in FUNCTIONS},
    "elu": lambda _, u: F.elu(u) + 1,
    "abs": lambda _, u: u.abs(),
    "cos": lambda _, u: u.cos(),
    "plain_exp": lambda _, u: u.exp(),
    "halves": lambda _, u: torch.cat([u.softmax(-1), (-u).softmax(-1)], -1),
    "log_softmax": lambda _, u: u.log_softmax(-1),
    "dpfp": dpfp,
    "pairs": pairs,
    "cosformer": cosformer,
}

ROW_WISE: dict[str, Callable[..., Outputs]] = {
    f.__name__: f for f in (embed, concat, product, head, head_product, add, mul, norm, apply, clamp, rotate, features)
}
