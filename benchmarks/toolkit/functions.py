"""Functions of layers in turns, forward, with gradients, and for one token: for `scan.py`, `convolution.py` and `low_rank.py`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.tables import markdown, mebibytes, milliseconds, ratio

logging.getLogger("transformers").setLevel(logging.ERROR)  # it says that it falls back
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS, THEIRS = "tarnn", "transformers"
Inputs = tuple[Tensor, ...]
Function = Callable[..., Any]
Found = dict[str, dict[str, Timing]]  # by cell and contender


def forward(function: Function, inputs: Inputs = ()) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def both(function: Function, inputs: Inputs) -> Callable[[], object]:
    """Forward and backward, of inputs whose layouts stay as they are."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sent = torch.randn_like(forward(function, inputs)())
    return lambda: torch.autograd.grad(function(*leaves), leaves, sent)


def results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of the sum of its squares."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = function(*leaves)
    return [o, *torch.autograd.grad(o.square().sum(), leaves)]


def wrong(found: Sequence[Tensor], expected: Sequence[Tensor], bound: float) -> str:
    """What is wrong with results, or nothing."""
    for x, y in zip(found, expected, strict=True):
        if not (x - y).abs().max() <= bound * y.abs().max():
            return f"errs by {(x - y).abs().max() / y.abs().max():.1e} of its size"
    return ""


def measure(
    found: Found,
    name: str,
    functions: Mapping[str, Function],
    inputs: Inputs,
    options: Any,
    keep: Callable[[], None],
    one_token: Mapping[str, Callable[[], object]] | None = None,
    patience: float = 3.0,
) -> None:
    """Add the cells "name, forward", "name, forward + backward" and, with calls for it, "name, one token"."""
    effort = Effort(0.02 if options.quick else 0.1, rounds=(options.rounds, options.rounds), seconds=60)
    cells = {way: {who: make(f, inputs) for who, f in functions.items()} for way, make in WAYS.items()}
    if one_token is not None:
        cells["one token"] = {who: forward(call) for who, call in one_token.items()}
    for way, calls in cells.items():
        cell = f"{name}, {way}"
        found[cell] = measure_in_turns({who: Contender(f, patience=patience) for who, f in calls.items()}, effort)
        print(f"{cell:50}" + "  ".join(f"{who} {x.ms:.4g} ms" for who, x in found[cell].items()), flush=True)
        keep()


WAYS = {"forward": forward, "forward + backward": both}


def faster(found: Found, begin: str) -> dict[str, float]:
    """How many times as fast ours is as transformers' function, of whole texts."""
    cells = {name: x for name, x in found.items() if name.startswith(begin) and "one token" not in name}
    return {name: x[THEIRS].ms / x[OURS].ms for name, x in cells.items()}


def table(found: Found) -> str:
    """Milliseconds of each contender, how many times as fast ours is as each other, and memory."""
    rows, names = [], list(next(iter(found.values())))
    for cell, x in found.items():
        others = [ratio(x[who], x[OURS]) for who in names[1:]]
        rows.append([cell, *map(milliseconds, x.values()), *others, *(mebibytes(y.peak_bytes) for y in x.values())])
    header = [*(f"{who}, ms" for who in names), *(f"× {who}" for who in names[1:]), *(f"{who}, MiB" for who in names)]
    return markdown(["", *header], rows)
