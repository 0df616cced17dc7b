"""Causal attention on a GPU: ours, plain PyTorch, SDPA (FlashAttention) and flash-linear-attention, on its own six shapes.

    python benchmarks/gpu_attention.py            # a few minutes on a GPU; benchmarks/results/gpu_attention.{json,md}
    python benchmarks/gpu_attention.py --minutes 3  # the first cells: ours, then one baseline after another
    python benchmarks/gpu_attention.py --dry-run  # seconds on a CPU: does the script run?

elu + 1 and the normaliser, bfloat16, forward and forward + backward; flash-linear-attention is given features and does not
normalise, and takes part where it is installed. The floor is what the tensors alone cost: q, k, v and o read or written once
forward, twelve such passes for both, at the bandwidth of a copy. Each method is first compared with float64. Without a GPU
the page says so, and has the floors alone.
"""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.gpu_clock import about, copy_bandwidth, gpu, milliseconds, where

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn import Elu, linear_attention
from tarnn.kernels import contract

SHAPES = {  # b, t, h, d
    "1×8192×96×128": (1, 8192, 96, 128),
    "2×16384×16×128": (2, 16384, 16, 128),
    "4×2048×16×128": (4, 2048, 16, 128),
    "4×4096×64×128": (4, 4096, 64, 128),
    "8×2048×32×256": (8, 2048, 32, 256),
    "8×1024×8×64": (8, 1024, 8, 64),
}
TINY = (1, 40, 2, 16)  # of a dry run
FULL = {"shapes": list(SHAPES), "minutes": 60.0, "dry_run": False}
QUICK = {"shapes": ["8×1024×8×64"]}
PASSES = {"forward": 4, "both": 12}  # how often as many bytes as q has go through memory, at least
H200 = 4.8e12  # bytes per second, by its data sheet: for floors where there is nothing to measure
PHI = Elu()
OURS, PLAIN = "tarnn", "plain PyTorch"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(q, k, v, PHI, causal=True)


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """In here, forward and backward are plain PyTorch's."""
    with mock.patch.object(contract, "ORDER", ("eager",)):
        contract.backends.cache_clear()
        yield
    contract.backends.cache_clear()


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def methods() -> dict[str, Attend]:
    found: dict[str, Attend] = {OURS: ours, PLAIN: ours, "SDPA": softmax}
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.linear_attn import chunk_linear_attn

        def fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = (x.transpose(1, 2) for x in (q, k, v))  # (b, t, h, d), as it wants them
            return chunk_linear_attn(*given, scale=1.0, normalize=False)[0].transpose(1, 2)

        found["flash-linear-attention"] = fla
    return found


def inputs(shape: str, device: str) -> list[Tensor]:
    """(b, h, t, d), in memory as a projection leaves them."""
    b, t, h, d = SHAPES[shape] if device == "cuda" else TINY
    make = lambda: torch.randn(b, t, h, d, device=device, dtype=torch.bfloat16).transpose(1, 2)  # noqa: E731
    return [make().requires_grad_() for _ in range(3)]


def check(options) -> str:
    """What is wrong with ours, against float64 in plain PyTorch, or nothing."""
    device = where(options)
    if device is None:
        return ""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 300, 64, device=device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    found = ours(q, k, v)
    grad = torch.randn_like(found)
    mine = [found, *torch.autograd.grad(found, (q, k, v), grad)]
    with plainly():
        expected = ours(*exact)
        right = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    errors = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(mine, right)]
    return "" if max(errors) < 2e-2 else f"relative errors of o, dq, dk, dv: {errors}"


def measure(options, results: dict[str, list[dict[str, Any]]], keep) -> None:
    begun, rows = time.monotonic(), results.setdefault("calls", [])
    device, bandwidth = where(options), copy_bandwidth() if gpu() else H200
    for shape in options.shapes:
        for passes in PASSES:
            rows.append({"shape": shape, "passes": passes, "floor_ms": moved(shape, passes) / bandwidth * 1e3})
    keep()
    for name in methods() if device else ():
        for row in rows:
            if time.monotonic() - begun > 60 * options.minutes:
                return
            row[name] = time_of(name, row["shape"], row["passes"], str(device))
            keep()


def moved(shape: str, passes: str) -> int:
    """Bytes through memory, at least."""
    b, t, h, d = SHAPES[shape]
    return PASSES[passes] * b * t * h * d * 2


def time_of(name: str, shape: str, passes: str, device: str) -> float | None:
    """Milliseconds, or None where memory doesn't suffice, or a baseline does not run."""
    q, k, v = inputs(shape, device)
    grad, attend = torch.randn_like(v), methods()[name]
    with plainly() if name == PLAIN else contextlib.nullcontext():
        try:
            if passes == "forward":
                with torch.no_grad():
                    return milliseconds(lambda: attend(q, k, v), device)
            return milliseconds(lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), grad), device)
        except torch.OutOfMemoryError:
            return None
        except Exception as error:
            if name == OURS:
                raise
            print(f"{name} does not run at {shape}: {error}", file=sys.stderr)
            return None
        finally:
            torch.cuda.empty_cache()


def report(options, facts: dict[str, Any], results: dict[str, list[dict[str, Any]]]) -> str:
    names = list(methods())
    number = lambda x: None if x is None else f"{x:.3f}"  # noqa: E731
    rows = []
    for row in results["calls"]:
        mine = row.get(OURS)
        share = None if mine is None else f"{row['floor_ms'] / mine:.0%}"
        rate = None if mine is None else f"{moved(row['shape'], row['passes']) / mine / 1e6:,.0f}"
        rows.append(
            [row["shape"], row["passes"], number(row["floor_ms"]), *(number(row.get(x)) for x in names), share, rate]
        )
    return page(
        "Causal attention on a GPU",
        about(options, " Floors are computed, for an H200."),
        f"`{facts['command']}`. Milliseconds; bfloat16; b × t × h × d. The floor: {PASSES['forward']} passes over a tensor "
        f"forward, {PASSES['both']} for both, at the bandwidth of a copy. Share: the floor by our time; GB/s: its bytes by it.",
        markdown(["shape", "passes", "floor", *names, "share of floor", "GB/s"], rows, left=2),
    )


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"shapes": list(SHAPES)})
    return run(options, measure, check=check, report=report, facts=lambda options, results: {"gpu": gpu()})


if __name__ == "__main__":
    raise SystemExit(main())
