"""Scans as tests draw and call them: by the definition in float64, and in the layout (b, h, t, d) of the other ops."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tarnn import ScanState, diagonal_scan, diagonal_scan_step, selective_scan, selective_scan_step
from tarnn.ops.scan import definition

FUNCTIONS = {"diagonal": diagonal_scan, "selective": selective_scan}
STEPS = {"diagonal": diagonal_scan_step, "selective": selective_scan_step}


@dataclass(frozen=True)
class Scan:
    """A call: its tensors by name, in the order of the function's arguments; the state before it; its mask."""

    kind: str
    tensors: dict[str, Tensor]
    h: Tensor | None = None
    key_mask: Tensor | None = None

    def map(self, f) -> "Scan":
        return replace(
            self, tensors={k: f(x) for k, x in self.tensors.items()}, h=None if self.h is None else f(self.h)
        )

    def leaves(self, dtypes: dict[str, torch.dtype] | None = None) -> "Scan":
        """The same numbers, rounded where types are given, as leaves of a graph."""
        cast = {k: x.to((dtypes or {}).get(k, x.dtype)) for k, x in self.tensors.items()}
        return replace(self, tensors=cast).map(lambda x: x.detach().clone().requires_grad_())

    def part(self, start: int | None, stop: int | None, h: Tensor | None = None) -> "Scan":
        in_time = {k: x[:, start:stop] if k not in "AD" else x for k, x in self.tensors.items()}
        mask = None if self.key_mask is None else self.key_mask[:, start:stop]
        return replace(self, tensors=in_time, key_mask=mask, h=h)

    def rows(self, row: slice) -> "Scan":
        tensors = {k: x[row] if k not in "AD" else x for k, x in self.tensors.items()}
        pick = lambda x: None if x is None else x[row]  # noqa: E731
        return replace(self, tensors=tensors, h=pick(self.h), key_mask=pick(self.key_mask))

    def ours(self, **options) -> tuple[Tensor, Tensor]:
        state = None if self.h is None else ScanState(self.h)
        o, state = FUNCTIONS[self.kind](
            *self.tensors.values(), key_mask=self.key_mask, state=state, return_state=True, **options
        )
        return o, state.h

    def step(self, **options) -> tuple[Tensor, Tensor]:
        o, state = STEPS[self.kind](
            *self.tensors.values(), state=None if self.h is None else ScanState(self.h), **options
        )
        return o, state.h

    def exact(self) -> tuple[Tensor, Tensor]:
        """By the definition, in the type of the tensors."""
        return getattr(definition, f"{self.kind}_scan")(*self.tensors.values(), key_mask=self.key_mask, h=self.h)

    def gradients(self, results: tuple[Tensor, ...], sent: list[Tensor]) -> dict[str, Tensor]:
        names = [*self.tensors, *([] if self.h is None else ["h"])]
        inputs = [*self.tensors.values(), *([] if self.h is None else [self.h])]
        return dict(zip(names, torch.autograd.grad(results, inputs, sent, materialize_grads=True)))


def draw(
    kind: str,
    b: int,
    t: int,
    c: int,
    n: int = 3,
    *,
    seed: int = 0,
    state: bool = False,
    masked: bool = False,
    skip: bool = True,
) -> Scan:
    """A call in float64. skip: with D."""
    generator = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=generator, device="cpu").double()  # noqa: E731
    if kind == "diagonal":
        tensors = {"x": rand(b, t, c), "log_decay": -rand(b, t, c).square()}
        h = rand(b, c)
    else:
        tensors = {"x": rand(b, t, c), "dt": (rand(b, t, c) - 2).exp(), "A": -(rand(c, n) + 1).exp()}
        tensors |= {"B": rand(b, t, n), "C": rand(b, t, n)} | ({"D": rand(c)} if skip else {})
        h = rand(b, c, n)
    mask = torch.rand(b, t, generator=generator, device="cpu") > 0.3 if masked else None
    scan = Scan(kind, tensors, h if state else None, mask)
    device = torch.get_default_device()
    moved = scan.map(lambda x: x.to(device))
    return replace(moved, key_mask=None if mask is None else mask.to(device))


# --- for the laws of all ops, whose inputs are (b, h, t, d)


def _merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _split(o: Tensor, like: Tensor) -> Tensor:
    return o.unflatten(2, (like.shape[1], like.shape[3])).transpose(1, 2)


def _of_heads(function):
    def call(x, *others, log_decay, **options):
        results = function(_merged(x), _merged(log_decay), *(_merged(y) for y in others), **options)
        return (_split(results[0], x), results[1]) if isinstance(results, tuple) else _split(results, x)

    return call


def _selective(function):
    def call(x, rates, B, C, **options):
        A = -torch.linspace(0.5, 2, x.shape[2] * B.shape[2], dtype=x.dtype).view(x.shape[2], -1)
        return function(x, -rates, A, B, C, A[:, 0], **options)

    return call


diagonal_of_heads, diagonal_step_of_heads = _of_heads(diagonal_scan), _of_heads(diagonal_scan_step)
selective_of_heads, selective_step_of_heads = (_of_heads(_selective(f)) for f in (selective_scan, selective_scan_step))
