"""Short convolution and Mamba-2's scan, beside the functions that transformers runs on a CPU.

    python benchmarks/convolution.py        # five minutes; benchmarks/results/convolution.{json,md}

The claim: what Mamba-2's layers call between their projections takes a fraction of the time and memory of transformers'
PyTorch functions (`causal_conv1d_fn`, `mamba2_chunk_scan` and those of one token), forward and with gradients. Convolution:
4,096 channels of width 4 with silu. Scan: 64 heads of 64, a state of 128, 8 groups of B and C, which `linear_attention` takes as
they are, with D and dt. 2,048 tokens, batch 1. All take turns, in one process, on the same inputs, laid out as projections lay
them out. Correctness is checked first, against the same functions of transformers.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit import functions
from toolkit.functions import DTYPES, OURS, THEIRS, Found, Inputs
from transformers.models.mamba2 import modeling_mamba2 as mamba2

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import page, source
from scripts.common.targets import Target, at_least, section
from tarnn import ConvolutionState, LinearState, linear_attention, short_convolution, short_convolution_step, step

CHANNELS, WIDTH = 4096, 4
HEADS, HEAD_DIM, STATE, GROUPS, CHUNK = 64, 64, 128, 8, 256
FASTER = {"convolution": 3.0, "scan": 5.0}


def main() -> int:
    full, quick = {"length": 2048, "dtypes": list(DTYPES), "rounds": 9}, {"length": 300, "rounds": 2}
    options = parse(__file__, __doc__, full, quick, choices={"dtypes": list(DTYPES)})
    return run(options, measure, check=check, targets=targets, report=report)


# --- the functions: (x, weight, bias), and (x, dt, A, B, C, D), all as layers have them


def our_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return short_convolution(x, weight, bias, activation="silu")


def their_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return mamba2.causal_conv1d_fn(x.transpose(1, 2), weight, bias, "silu").transpose(1, 2)


def our_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """x (b, t, heads, head_dim), dt (b, t, heads), B and C (b, t, groups, state); in float32, as transformers computes it."""
    q, k, v = (y.float().transpose(1, 2) for y in (C, B, x * dt[..., None]))
    decay = (dt * A).transpose(1, 2)
    o = linear_attention(q, k, v, "identity", causal=True, normalize=False, log_decay=decay)
    return o.transpose(1, 2) + D[:, None] * x


def their_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    found = mamba2.mamba2_chunk_scan(x, dt, A, B, C, chunk_size=CHUNK, D=D)
    return found[0] if isinstance(found, tuple) else found


FUNCTIONS = {
    "convolution": {OURS: our_convolution, THEIRS: their_convolution},
    "scan": {OURS: our_scan, THEIRS: their_scan},
}


def draw(what: str, t: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)
    if what == "convolution":
        return tuple(
            x.to(dtype) for x in (torch.randn(1, t, CHANNELS), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS))
        )
    x, dt, A = torch.randn(1, t, HEADS, HEAD_DIM), torch.rand(1, t, HEADS), -torch.rand(HEADS)
    B, C = (torch.randn(1, t, GROUPS, STATE) / STATE**0.5 for _ in range(2))
    return x.to(dtype), dt, A, B.to(dtype), C.to(dtype), torch.rand(HEADS)


def check(options) -> str:
    """What is wrong with ours, or nothing: outputs and gradients of 300 tokens, as transformers' functions give them."""
    for what, by in FUNCTIONS.items():
        inputs = draw(what, 300, torch.float32)
        if error := functions.wrong(*(functions.results(by[who], inputs) for who in (OURS, THEIRS)), 1e-4):
            return f"{what} {error}, by transformers' results"
    return ""


def tokens(what: str, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """One token, and a state that is written in place."""
    one = tuple(x[:, :1] if x.ndim >= 3 else x for x in inputs)
    if what == "convolution":
        x, weight, bias = one
        theirs = torch.zeros(1, CHANNELS, WIDTH, dtype=x.dtype)
        ours = ConvolutionState.zeros(1, WIDTH, CHANNELS, dtype=x.dtype)
        calls = {
            OURS: lambda: short_convolution_step(x, weight, bias, activation="silu", state=ours, inplace=True),
            THEIRS: lambda: mamba2.causal_conv1d_update(x.transpose(1, 2), theirs, weight, bias, "silu"),
        }
    else:
        x, dt, A, B, C, D = one
        own = LinearState.zeros(1, HEADS, STATE, HEAD_DIM)
        cache = torch.zeros(1, HEADS, HEAD_DIM, STATE)
        q, k, v = (y.float().transpose(1, 2) for y in (C, B, x * dt[..., None]))
        decay = (dt * A).transpose(1, 2)
        spread = dt[:, 0, :, None].expand(1, HEADS, HEAD_DIM), A[:, None, None].expand(HEADS, HEAD_DIM, STATE)
        D = D[:, None].expand(HEADS, HEAD_DIM)
        calls = {
            OURS: lambda: step(q, k, v, "identity", own, normalize=False, log_decay=decay, inplace=True),
            THEIRS: lambda: mamba2.mamba2_selective_state_update(cache, x[:, 0], *spread, B[:, 0], C[:, 0], D),
        }
    return calls


def measure(options, found: Found, keep) -> None:
    for dtype in options.dtypes:
        for what, by in FUNCTIONS.items():
            inputs = draw(what, options.length, DTYPES[dtype])
            functions.measure(found, f"{what}, {dtype}", by, inputs, options, keep, tokens(what, inputs), patience=60)


def targets(found: Found) -> list[Target]:
    return [
        at_least(
            f"{what}: at least {bound:g} times transformers' speed",
            "float32",
            bound,
            functions.faster(found, f"{what}, float32"),
        )
        for what, bound in FASTER.items()
    ]


def report(options, facts: dict[str, Any], found: Found) -> str:
    how = (
        f"{options.length:,} tokens, batch 1. Convolution: {CHANNELS:,} channels, width {WIDTH}, silu. Scan: {HEADS} heads of "
        f"{HEAD_DIM}, state {STATE}, {GROUPS} groups, dt and decays in float32. Medians, in turns; MiB above what was "
        "there before a call, results included."
    )
    title = "Short convolution and Mamba-2's scan"
    return page(title, source(facts, how), section(targets(found)), functions.table(found))


if __name__ == "__main__":
    sys.exit(main())
