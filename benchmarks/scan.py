"""Mamba-1's selective scan and RG-LRU's diagonal scan, beside the functions that transformers runs on a CPU.

    python benchmarks/scan.py        # ten minutes, most of them transformers' backward; benchmarks/results/scan.{json,md}

The claim: Mamba's scan takes a twentieth of the time of transformers' loop over tokens (`mamba_selective_scan`,
`mamba_selective_state_update` for one token) and a small part of its memory, forward and with gradients. RG-LRU's scan is
measured beside RecurrentGemma's loop (`_rnn_scan`). Mamba: 1,536 channels of 16 numbers. RG-LRU: 2,560 channels. Batch 1. All
take turns, in one process, on the same inputs, laid out as the layers lay them out: of Mamba's x and dt, time runs fastest.
Correctness is checked first, against the definition in float64.

The gradient of each token that transformers' loop picks is a tensor of all tokens. So its backward pass grows with the square of
the length, and there are two lengths.
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
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import page, source
from scripts.common.targets import Target, at_least, section
from tarnn import ScanState, diagonal_scan, diagonal_scan_step, selective_scan, selective_scan_step
from tarnn.ops.scan import definition

CHANNELS = {"selective": 1536, "diagonal": 2560}
NUMBERS = 16
FASTER = 20.0


def main() -> int:
    full = {"lengths": [512, 2048], "dtypes": list(DTYPES), "rounds": 9}
    options = parse(__file__, __doc__, full, {"lengths": [48], "rounds": 2}, choices={"dtypes": list(DTYPES)})
    return run(options, measure, check=check, targets=targets, report=report)


# --- the functions: (x, dt, A, B, C, D) and (x, log_decay), as layers have them


def their_selective(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    return mamba.mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT, D=D).mT


def their_diagonal(x: Tensor, log_decay: Tensor) -> Tensor:
    reset = torch.zeros(*x.shape[:2], 1, dtype=torch.bool)
    return RecurrentGemmaRglru._rnn_scan(None, x, log_decay.exp(), reset, None)[0]


FUNCTIONS = {
    "selective": {OURS: selective_scan, THEIRS: their_selective},
    "diagonal": {OURS: diagonal_scan, THEIRS: their_diagonal},
}


def draw(what: str, t: int, dtype: torch.dtype) -> Inputs:
    """x, B and C in the dtype of a model; dt, A, D and decays in float32."""
    torch.manual_seed(0)
    c = CHANNELS[what]
    if what == "diagonal":
        return torch.randn(1, t, c).to(dtype), -0.1 * torch.rand(1, t, c)
    x, dt = torch.randn(1, c, t).to(dtype).mT, (torch.rand(1, c, t) * 0.1 + 0.001).mT
    A = -torch.arange(1.0, NUMBERS + 1).repeat(c, 1)
    B, C = (torch.randn(1, t, NUMBERS).to(dtype) for _ in range(2))
    return x, dt, A, B, C, torch.rand(c)


def check(options) -> str:
    """What is wrong with ours, or nothing: outputs and gradients of 100 tokens against the definition in float64."""
    for what, by in FUNCTIONS.items():
        inputs = draw(what, 100, torch.float32)
        exact = functions.results(
            lambda *x, what=what: getattr(definition, f"{what}_scan")(*x)[0], [x.double() for x in inputs]
        )
        if error := functions.wrong(functions.results(by[OURS], inputs), exact, 1e-5):
            return f"the {what} scan {error}"
    return ""


def tokens(what: str, inputs: Inputs) -> dict[str, Callable[[], object]]:
    """One token, and a state that is written in place where the function does so."""
    one, c = tuple(x[:, :1] if x.ndim == 3 else x for x in inputs), CHANNELS[what]
    if what == "diagonal":
        state, before = ScanState.zeros(1, c), torch.zeros(1, c)
        reset = torch.zeros(1, 1, 1, dtype=torch.bool)
        calls = {
            OURS: lambda: diagonal_scan_step(*one, state=state, inplace=True),
            THEIRS: lambda: RecurrentGemmaRglru._rnn_scan(None, one[0], one[1].exp(), reset, before),
        }
    else:
        state, cache = ScanState.zeros(1, c, NUMBERS), torch.zeros(1, c, NUMBERS)
        x, dt, A, B, C, D = one
        calls = {
            OURS: lambda: selective_scan_step(*one, state=state, inplace=True),
            THEIRS: lambda: mamba.mamba_selective_state_update(cache, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D),
        }
    return calls


def measure(options, found: Found, keep) -> None:
    for dtype in options.dtypes:
        for t in options.lengths if dtype == "float32" else options.lengths[:1]:
            for what, by in FUNCTIONS.items():
                inputs = draw(what, t, DTYPES[dtype])
                one_token = tokens(what, inputs) if t == options.lengths[0] else None
                functions.measure(found, f"{what}, {dtype}, {t} tokens", by, inputs, options, keep, one_token)


def targets(found: Found) -> list[Target]:
    values = functions.faster(found, "selective, float32")
    return [at_least(f"Mamba's scan: at least {FASTER:g} times transformers' speed", "float32", FASTER, values)]


def report(options, facts: dict[str, Any], found: Found) -> str:
    how = (
        f"Batch 1. Selective (Mamba): {CHANNELS['selective']:,} channels of {NUMBERS} numbers. Diagonal (RG-LRU): "
        f"{CHANNELS['diagonal']:,} channels. dt and decays in float32. Medians, in turns; a call of over three seconds "
        "is made once. MiB above what was there before a call, results included."
    )
    return page("Mamba's scan and RG-LRU's", source(facts, how), section(targets(found)), functions.table(found))


if __name__ == "__main__":
    sys.exit(main())
