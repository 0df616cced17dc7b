"""Drawn calls of the op on Triton's kernels, by the honest interpreter: the thorough form of `triton/interpreted/`.

    python tests/fuzz_triton.py                   # 200 calls, two hours; benchmarks/results/gpu_fuzz.json
    python tests/fuzz_triton.py --minutes 10 --out /tmp/fuzz.json

Calls are those of `fuzz.py` in float32, bfloat16 and float16, with at most two rows, heads and queries per head. Programs
run in a shuffled order; in every second call a sequence is cut into items of one chunk. What may be wrong by how much is
what `fuzz.py` says; but in 16 bits the terms of a state are rounded once, as tensor cores read them.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import fuzz
import torch
import triton
from support import honest_interpreter
from support.fuzz_calls import DTYPES, Drawn, draw

from tarnn.kernels.triton import launch, machine

RESULTS = Path(__file__).parents[1] / "benchmarks/results/gpu_fuzz.json"


def drawn(seed: int, number: int) -> Drawn:
    call = draw(seed, number)
    dtype = ("float32", "bfloat16", "float16")[number % 3] if call.dtype == "float64" else call.dtype
    small = {name: min(getattr(call, name), 2) for name in ("b", "g", "r")}
    return replace(call, **small, dtype=dtype, tiny_chunks=False, threads=1)


def wrong(call: Drawn) -> list[str]:
    """What is wrong with it, in words."""
    processors = 10_000 if call.number % 2 else 1
    with (
        mock.patch.object(launch, "processors", return_value=processors),
        honest_interpreter.order(call.number),
    ):
        try:
            errors, limits, _ = fuzz.judge(call)
        except Exception as error:  # whatever the interpreter finds
            return [f"{type(error).__name__}: {error}"]
    if call.dtype != "float32":
        once = torch.finfo(DTYPES[call.dtype]).eps
        limits = limits | {kind: max(limits[kind], once) for kind in "Sz"}
    return [
        f"{kind}: error {errors[kind]:.2g}, at most {limits[kind]:.2g}"
        for kind in fuzz.exceeded(errors, limits)
    ]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--calls", type=int, default=200)
    made.add_argument("--first", type=int, default=0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--minutes", type=float, default=120.0)
    made.add_argument("--out", type=Path, default=RESULTS)
    options = made.parse_args()
    honest_interpreter.install()
    machine.interpreted = True
    begun, kinds, failures, number = time.monotonic(), Counter(), [], options.first
    while number < options.first + options.calls and time.monotonic() - begun < 60 * options.minutes:
        call = drawn(options.seed, number)
        if faults := wrong(call):
            failures.append({"call": asdict(call), "wrong": faults})
            print(number, *faults, call, sep="\n   ", flush=True)
        kinds.update(
            [
                call.dtype,
                call.feature_map,
                call.way,
                f"decay {call.decay}",
                "causal" if call.causal else "full",
            ]
        )
        number += 1
        options.out.write_text(
            json.dumps(
                {
                    "about": "not measured on a GPU: run by Triton's interpreter on a CPU, made to compute as a GPU does",
                    "versions": {"torch": torch.__version__, "triton": triton.__version__},
                    "seed": options.seed, "first": options.first, "calls": number - options.first,
                    "kinds": dict(sorted(kinds.items())), "failures": failures,
                },
                indent=1,
            ) + "\n"
        )  # fmt: skip
    print(f"{number - options.first} calls, {len(failures)} wrong")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
