"""Float32 products by oneDNN, which can be faster than torch's default, where it keeps float32's error.

With `torch.set_float32_matmul_precision("medium")`, torch hands the float32 products of a CPU to oneDNN and allows it to round
their inputs to bfloat16. oneDNN does that on processors with units for it (AMX, some of ARM's); on others it multiplies in
float32, with kernels of its own. MKL, torch's default on x86, has slower kernels for AMD's processors. Which of the two happens
here depends on the processor and on torch's version, and products show it: by their error against float64. No clock is
read, so the same machine always chooses the same; the choice decides about the last bits of results.

TARNN_FAST_MATMUL=off keeps torch's default everywhere.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache
from operator import index
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

HIGHEST, FAST = "highest", "medium"  # torch's words: its default library, and oneDNN
MIXED = "set by torch.backends"  # in place of a word, where torch has none for what was set
VARIABLE = "TARNN_FAST_MATMUL"
BOUND = 4.0  # times the default's error; rounding to bfloat16 has a thousand times
LEAST = 2**24  # multiplications of a product: of smaller ones, calling oneDNN costs more than its kernels gain
LARGEST = 512  # numbers along an axis of a product that is probed: the error of longer sums says nothing more
SAMPLED = 16  # rows of it that are computed in float64

Shape = tuple[int, int, int]  # of the product of a linear layer: rows, inputs, outputs
USUAL: tuple[Shape, ...] = ((1024, 128, 384), (1024, 256, 704))


class Choice(NamedTuple):
    """Who computes float32 products: torch's word for it, the reason, and a sentence if that is not as recorded."""

    precision: str
    why: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.precision}: {self.why}"


def choose(shapes: tuple[Shape, ...], device: torch.device | str = "cpu", recorded: str | None = None) -> Choice:
    """Choose the precision of float32 products for work of these shapes on a device.

    recorded: the precision of the run that goes on here, or of the state that is read; it is taken where it can be. A
    precision that the caller has set in torch always wins. Raises ValueError for an unknown TARNN_FAST_MATMUL.
    """
    if (set_before := precision_of_the_caller()) != HIGHEST:
        choice = Choice(set_before, "set in torch by the caller")
    elif recorded == HIGHEST:
        choice = Choice(HIGHEST, "as recorded")
    elif torch.device(device).type != "cpu":
        choice = Choice(HIGHEST, f"on {torch.device(device).type} nothing is chosen")
    elif recorded is None and mean_size(shapes) < LEAST:
        choice = Choice(HIGHEST, "the products are too small for oneDNN to gain")
    elif reason := refusal(shapes):
        choice = Choice(HIGHEST, reason)
    else:
        choice = Choice(FAST, "oneDNN in float32, which keeps its precision here")
    if recorded in (None, choice.precision):
        return choice
    return choice._replace(
        note=f"float32 products were computed with precision {recorded!r} before; here they are with "
        f"{choice.precision!r} ({choice.why}), so results may differ in their last bits"
    )


class use_precision(AbstractContextManager):
    """Within: torch's float32 products have this precision, in the whole process. MIXED changes nothing.

    Contexts may be nested, and may overlap in several threads: the last one entered counts, and when none is left torch
    has what it had before.
    """

    def __init__(self, precision: str):
        self.precision = precision

    def __enter__(self):
        global _before
        with _lock:
            if not _entered:
                _before = precision_now()
            _entered.append(self)
            set_precision(self.precision)
        return self

    def __exit__(self, *error) -> None:
        with _lock:
            _entered.remove(self)
            set_precision(_entered[-1].precision if _entered else _before)


class fast_matmul(use_precision):
    """Compute float32 products on the CPU by oneDNN, where it is as exact as torch's default: from now on, or in a `with` block.

    It sets `torch.set_float32_matmul_precision`, which holds for the whole process. Nothing changes where oneDNN would round
    to bfloat16, where the caller has set a precision, where there is an accelerator (the switch would round its
    products too), or with TARNN_FAST_MATMUL=off. `precision` and `why` say what was chosen.

    shapes: (rows, inputs, outputs) of the products whose errors decide; by default those of small models.
    `tarnn.matmul.shapes_of(model, rows)` has those of a model. ValueError for anything else.

        with tarnn.fast_matmul():
            model(input_ids)
    """

    def __init__(self, shapes: Iterable[Shape] = USUAL):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        choice = choose(checked(shapes), "cpu" if accelerator is None else accelerator)
        super().__init__(choice.precision)
        self.why = choice.why
        super().__enter__()

    def __enter__(self):
        return self if self in _entered else super().__enter__()

    def __repr__(self) -> str:
        return f"fast_matmul(precision={self.precision!r}: {self.why})"


def checked(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes as tuples of whole numbers. Raises ValueError for anything else."""
    try:
        as_tuples = tuple((index(m), index(k), index(n)) for m, k, n in shapes)
    except (TypeError, ValueError):
        as_tuples = ()
    if not as_tuples or min(map(min, as_tuples)) < 1:
        raise ValueError(f"shapes are (rows, inputs, outputs) of products, whole numbers above 0; got {shapes!r}.")
    return as_tuples


def shapes_of(model: nn.Module, rows: int) -> tuple[Shape, ...]:
    """The shapes of a model's products with its weights, each once, for `rows` tokens at a time."""
    layers = (layer for layer in model.modules() if not isinstance(layer, nn.Embedding))
    weights = (getattr(layer, "weight", None) for layer in layers)
    sizes = {tuple(weight.shape) for weight in weights if isinstance(weight, Tensor) and weight.ndim == 2}
    return tuple(sorted((rows, inputs, outputs) for outputs, inputs in sizes))


def gains_from_bfloat16(shapes: tuple[Shape, ...]) -> bool:
    """Whether this processor has instructions for bfloat16 that make products of these shapes faster (known of x86 alone)."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return mean_size(shapes) >= LEAST and bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def mean_size(shapes: Iterable[Shape]) -> float:
    """Multiplications per product; 0 without any."""
    sizes = [m * k * n for m, k, n in shapes]
    return sum(sizes) / max(1, len(sizes))


def refusal(shapes: tuple[Shape, ...]) -> str | None:
    """Why oneDNN is not to compute products of these shapes; None where it may. ValueError for an unknown TARNN_FAST_MATMUL."""
    if (value := os.environ.get(VARIABLE, "")) not in ("", "on", "off"):
        raise ValueError(f"{VARIABLE}={value} is not known; expected on or off.")
    if value == "off":
        return f"{VARIABLE}=off"
    if not switches_library():
        return "torch would not use oneDNN on this processor"
    ratio = error_ratio(shapes)
    return None if ratio <= BOUND else f"oneDNN rounds them here: {ratio:,.0f} times the error of torch's default"


def switches_library() -> bool:
    """Whether torch hands float32 products to oneDNN at all: where it was built with that, and on x86 for AVX-512 alone."""
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


@cache
def error_ratio(shapes: tuple[Shape, ...]) -> float:
    """The error of oneDNN's products, divided by that of torch's default: the worst of all shapes, forward and backward.

    Errors are root mean squares against float64, of normal numbers. NaN where a product has one.
    """
    ratios = [1.0]
    generator = torch.Generator("cpu").manual_seed(0)
    with _lock, torch.no_grad(), torch.autocast("cpu", enabled=False):
        for shape in shapes:
            m, k, n = (min(size, LARGEST) for size in shape)
            x, weight, grad = (
                torch.randn(*size, generator=generator, device="cpu", dtype=torch.float32)
                for size in ((m, k), (n, k), (m, n))
            )
            for a, b in ((x, weight.T), (grad, weight), (grad.T, x)):
                exact = a[:SAMPLED].double() @ b.double()
                default, fast = (error(a, b, exact, precision) for precision in (HIGHEST, FAST))
                ratios.append(float(fast / torch.maximum(default, 2**-26 * root_mean_square(exact))))
    return float(torch.tensor(ratios).max())  # whose maximum of NaN is NaN


def error(a: Tensor, b: Tensor, exact: Tensor, precision: str) -> Tensor:
    """The error of a's product with b, computed with that precision."""
    with use_precision(precision):
        return root_mean_square(multiply(a, b)[:SAMPLED].double() - exact)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def root_mean_square(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def precision_of_the_caller() -> str:
    """The precision that was set in torch, but for what stands here."""
    with _lock:
        return _before if _entered else precision_now()


def precision_now() -> str:
    """torch's word for the precision of float32 products; MIXED where it has none, as after torch.backends' own switches."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return MIXED


def set_precision(precision: str) -> None:
    if precision != MIXED and precision != precision_now():
        torch.set_float32_matmul_precision(precision)


_lock = RLock()
_entered: list[use_precision] = []
_before = HIGHEST
