"""Drawn calls of the op on Triton's kernels, by the honest interpreter: the thorough form of `triton/interpreted/`.

    python tests/fuzz_triton.py                   # 1,000 calls, an hour of one core; benchmarks/results/gpu_fuzz.json
    python tests/fuzz_triton.py --minutes 10 --out /tmp/fuzz.json

Ctrl-C keeps what is done; the same command goes on. Calls are those of `fuzz.py` in float32, bfloat16 and float16, with one
or two rows and heads, at most 67 positions and four steps. Programs run in a shuffled order; in every second call a sequence
is cut into items of one chunk. What may be wrong by how much is what `fuzz.py` says, and besides what tensor cores may lose.
They read features, the weights that values are added with, and states rounded once: in 16 bits to half a unit, in float32,
multiplied in three parts, to 2^-22. Twice the error that this gives the definition is allowed, where terms cancel too.
Denominators are not made of weights so rounded, so outputs are off by up to half a unit before they are rounded themselves,
and gradients are made of those outputs.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import fuzz
import torch
import triton
from support import honest_interpreter
from support.fuzz_calls import DTYPES, Call, Drawn, draw

from tarnn.kernels.triton import device, launch

RESULTS = Path(__file__).parents[1] / "benchmarks/results/gpu_fuzz.json"


LONGEST, STEPS = 67, 4


def drawn(seed: int, number: int) -> Drawn:
    call = draw(seed, number)
    dtype = ("float32", "bfloat16", "float16")[number % 3] if call.dtype == "float64" else call.dtype
    longest = STEPS if call.way.startswith("stepped") else LONGEST
    g = min(call.g, 2)
    r = min(call.r, 2) if g == 1 else 1
    small = {
        "b": min(call.b, 2) if g * r == 1 else 1,
        "g": g,
        "r": r,
        "t": min(call.t, longest),
        "s": min(call.s, longest),
    }
    spread = call.spread if call.normalize else min(call.spread, 0.1 if dtype == "float16" else 1.0)  # as `draw` has it
    # the number says what is computed again: never with other threads, of which there are none
    return replace(
        call, **small, dtype=dtype, spread=spread, number=min(number % 4, 2) or 2, tiny_chunks=False, threads=1
    )


def read_by_tensor_cores(drawn: Drawn) -> dict[str, float]:
    """What may be wrong at least with a call."""
    dtype, call = DTYPES[drawn.dtype], Call(drawn)
    eps, exact = torch.finfo(dtype).eps, call.definition(torch.float64)
    if drawn.dtype == "float32":
        return {kind: 2 * x for kind, x in fuzz.errors(call.definition(torch.float64, units=2**-22), exact).items()}
    read = fuzz.errors(call.definition(torch.float64, units=eps / 2), exact)
    kept = [call.definition(torch.float64, outputs_kept_in=dtype, off_by=by) for by in (-eps / 2, eps / 2)]
    gradients = max(fuzz.errors(each, exact)["gradients"] for each in kept)
    return {kind: 2 * x + eps for kind, x in read.items()} | {"gradients": 2 * read["gradients"] + gradients + eps}


def wrong(call: Drawn, number: int) -> str:
    """What is wrong with it, in words."""
    least = read_by_tensor_cores(call)
    with (
        mock.patch.object(launch, "processors", return_value=10_000 if number % 2 else 1),
        honest_interpreter.order(number),
    ):
        try:
            return fuzz.judge(call, least)[2]
        except Exception as error:  # whatever the interpreter finds
            return f"{type(error).__name__}: {error}"


def earlier(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a run of the same code left there, or a new beginning."""
    found = json.loads(path.read_text()) if path.exists() else {}
    return (
        found
        if all(found.get(name) == x for name, x in facts.items())
        else {**facts, "calls": 0, "kinds": {}, "failures": []}
    )


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--calls", type=int, default=1000)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--minutes", type=float, default=240.0)
    made.add_argument("--out", type=Path, default=RESULTS)
    options = made.parse_args()
    honest_interpreter.install()
    device.interpreted = True
    torch.use_deterministic_algorithms(True)  # fills torch.empty with NaN: what isn't written shows
    found = earlier(
        options.out,
        {
            "about": "not measured on a GPU: run by Triton's interpreter on a CPU, made to compute as a GPU does",
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "seed": options.seed,
            "code": fuzz.fingerprint(),
        },
    )
    begun, kinds = time.monotonic(), Counter(found["kinds"])
    while found["calls"] < options.calls and time.monotonic() - begun < 60 * options.minutes:
        call = drawn(options.seed, found["calls"])
        if fault := wrong(call, found["calls"]):
            found["failures"].append({"number": found["calls"], "call": asdict(call), "wrong": fault})
            print(found["calls"], fault, call, sep="\n   ", flush=True)
        kinds.update(
            [call.dtype, call.feature_map, call.way, f"decay {call.decay}", "causal" if call.causal else "full"]
        )
        found |= {"calls": found["calls"] + 1, "kinds": dict(sorted(kinds.items()))}
        options.out.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n")
        options.out.with_suffix(".part").replace(options.out)
    print(f"{found['calls']} calls, {len(found['failures'])} wrong")
    return int(bool(found["failures"]))


if __name__ == "__main__":
    sys.exit(main())
