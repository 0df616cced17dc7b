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

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.passes import both, forward

from scripts.common.clock import Contender, Effort, Timing, measure_in_turns
from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, mebibytes, milliseconds, page, ratio, source
from scripts.common.targets import Target, at_least, section
from tarnn import ScanState, diagonal_scan, diagonal_scan_step, selective_scan, selective_scan_step
from tarnn.ops.scan import definition

logging.getLogger("transformers").setLevel(logging.ERROR)  # it says that it falls back
from transformers.models.mamba import modeling_mamba as mamba  # noqa: E402
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru  # noqa: E402

CHANNELS = {"selective": 1536, "diagonal": 2560}
NUMBERS = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OURS, THEIRS = "tarnn", "transformers"
FASTER = 20.0
PATIENCE = 3.0  # seconds for a call beyond which one must do
Inputs = tuple[Tensor, ...]


def main() -> int:
    full = {"lengths": [512, 2048], "dtypes": list(DTYPES), "rounds": 9}
    options = parse(__file__, __doc__, full, {"lengths": [48], "rounds": 2}, choices={"dtypes": list(DTYPES)})
    return run(options, measure, check=check, facts=facts, report=report)


def facts(options, found) -> dict[str, Any]:
    return {"targets": [t.as_json() for t in targets(found)]}


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
    for what, functions in FUNCTIONS.items():
        inputs = [x.requires_grad_() for x in draw(what, 100, torch.float32)]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        o, right = functions[OURS](*inputs), getattr(definition, f"{what}_scan")(*exact)[0]
        results = [o, *torch.autograd.grad(o.square().sum(), inputs)]
        expected = [right, *torch.autograd.grad(right.square().sum(), exact)]
        for x, y in zip(results, expected):
            if not (x - y).abs().max() <= 1e-5 * y.abs().max():
                return f"the {what} scan errs by {(x - y).abs().max() / y.abs().max():.1e} of its size"
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
    return {name: forward(call, ()) for name, call in calls.items()}


def measure(options, found: dict[str, dict[str, Timing]], keep) -> None:
    effort = Effort(0.02 if options.quick else 0.1, rounds=(options.rounds, options.rounds), seconds=60)
    for dtype in options.dtypes:
        for t in options.lengths if dtype == "float32" else options.lengths[:1]:
            for what, functions in FUNCTIONS.items():
                inputs = draw(what, t, DTYPES[dtype])
                ways = {"forward": forward, "forward + backward": both}
                cells = {
                    f"{t} tokens, {way}": {who: make(f, inputs) for who, f in functions.items()}
                    for way, make in ways.items()
                }
                if t == options.lengths[0]:
                    cells["one token"] = tokens(what, inputs)
                for way, calls in cells.items():
                    name = f"{what}, {dtype}, {way}"
                    contenders = {who: Contender(call, patience=PATIENCE) for who, call in calls.items()}
                    found[name] = measure_in_turns(contenders, effort)
                    print(
                        f"{name:50}" + "  ".join(f"{who} {x.ms:.4g} ms" for who, x in found[name].items()), flush=True
                    )
                    keep()


def targets(found: dict[str, dict[str, Timing]]) -> list[Target]:
    """How many times as fast ours is as transformers' function, in float32."""
    values = {
        name: x[THEIRS].ms / x[OURS].ms
        for name, x in found.items()
        if name.startswith("selective, float32") and "one token" not in name
    }
    return [at_least(f"Mamba's scan: at least {FASTER:g} times transformers' speed", "float32", FASTER, values)]


def report(options, facts: dict[str, Any], found: dict[str, dict[str, Timing]]) -> str:
    rows = []
    for name, x in found.items():
        ours, theirs = x[OURS], x[THEIRS]
        memory = [mebibytes(y.peak_bytes) for y in (ours, theirs)]
        rows.append([name, milliseconds(ours), milliseconds(theirs), ratio(theirs, ours), *memory])
    how = (
        f"Batch 1. Selective (Mamba): {CHANNELS['selective']:,} channels of {NUMBERS} numbers. Diagonal (RG-LRU): "
        f"{CHANNELS['diagonal']:,} channels. dt and decays in float32. Medians, in turns; a call of over {PATIENCE:g} seconds "
        "is made once. MiB above what was there before a call, results included."
    )
    header = ["", "tarnn, ms", "transformers, ms", "times as fast", "tarnn, MiB", "transformers, MiB"]
    return page("Mamba's scan and RG-LRU's", source(facts, how), section(targets(found)), markdown(header, rows))


if __name__ == "__main__":
    sys.exit(main())
