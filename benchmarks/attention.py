"""Time and memory of attention against length: tarnn's native kernels, the same in plain PyTorch, torch's SDPA.

    python benchmarks/attention.py           # about ten minutes on two cores; benchmarks/results/attention.{json,md,png}
    python benchmarks/attention.py --quick   # half a minute; runs/benchmarks/attention.{json,md,png}

`specialised, fast products` is that with `torch.set_float32_matmul_precision("medium")`, an expert's PyTorch on this CPU, and
`specialised, compiled` the same by `torch.compile` for each shape. A row names the best of plain PyTorch.
The claim: linear attention costs t and not t², and native kernels do it near the speed of torch.mm, in almost no
memory. Forward, and forward with backward; causal and not; float32 and bfloat16; d = e = 32, 64, 128. Two methods,
the native kernels and a PyTorch version specialised for this case, are also measured on views of (b, t, h·d), the
layout that models have, and cold: each call has inputs of its own, so that they come from memory. All methods run in
one process on the same inputs, in turns. Correctness is checked first; nothing is measured of what is wrong. What
would take too long or too much memory, by a shorter length's figures, is left out and listed. Results are written
after each cell: Ctrl-C keeps them, `--resume` goes on. fast-transformers and performer-pytorch take part where they
are installed.
"""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.attention_cells import HEADS_FIRST, SIDE_BY_SIDE, Costs, measure_cells
from toolkit.attention_check import wrong
from toolkit.attention_report import figure, report
from toolkit.attention_targets import targets
from toolkit.baselines import Method, available

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run

loaded = Costs.from_json  # as `scripts/redraw.py` reads results
FULL = {
    "lengths": [1, 16, 64, 128, 256, 1024, 4096, 16384, 65536],
    "head_dims": [32, 64, 128],
    "dtypes": ["float32", "bfloat16"],
    "kinds": ["causal", "full"],
    "passes": ["forward", "both"],
    "layouts": [HEADS_FIRST, SIDE_BY_SIDE],
    "caches": ["warm", "cold"],
    "methods": [str],
    "heads": 8,
    "batch_size": 1,
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "seconds": 1.0,
    "longest_call": 12.0,
    "resume": False,
}
QUICK = {
    "lengths": [64, 256, 1024, 4096],
    "head_dims": [64],
    "layouts": [HEADS_FIRST],
    "caches": ["warm"],
    "seconds": 0.3,
}
CHOICES = {
    "dtypes": ["float32", "bfloat16", "float16"],
    "kinds": ["causal", "full"],
    "passes": ["forward", "both"],
    "layouts": [HEADS_FIRST, SIDE_BY_SIDE],
    "caches": ["warm", "cold"],
}
ABOUT = {
    "methods": "only these, such as native sdpa",
    "resume": "go on where the results file ends",
    "seconds": "about so long, at most, for all rounds of one method",
    "longest_call": "seconds beyond which a method is left out",
}
Entrant = tuple[Method, str]  # who, and in which dtype


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices=CHOICES, about=ABOUT)
    return run(options, measure, results=Costs(), facts=facts, report=report, figure=figure)


def measure(options, costs: Costs, keep) -> None:
    entrants, absent = entrants_of(options)
    costs.take_up(options, shape(options))
    costs.absent = absent
    for name, why in absent.items():
        print(f"without {name}: {why}")
    measure_cells(entrants, costs, options, keep)


def entrants_of(options) -> tuple[list[Entrant], dict[str, str]]:
    """(who takes part in which dtype, who doesn't and why); Unmeasured for who isn't known, and where ours are wrong."""
    methods, absent = available(options.device)
    names = [m.name for m in methods]
    if unknown := set(options.methods or names) - {*names, *absent}:
        raise Unmeasured(f"no method is called {', '.join(unknown)}; there are {', '.join((*names, *absent))}.")
    entrants = []
    for method in (m for m in methods if m.name in (options.methods or names)):
        dtypes = [x for x in options.dtypes if method.dtypes is None or x in method.dtypes]
        for dtype in (["float64"] if method.ours else []) + dtypes:
            found = wrong(method, getattr(torch, dtype), options.head_dims, options.device)
            if found and method.ours:
                raise Unmeasured(f"the check is red: {method.name}, {found}.")
            if found:
                absent[f"{method.name} in {dtype}"] = found
            elif dtype in options.dtypes:
                entrants.append((method, dtype))
    return entrants, absent


def shape(options) -> dict[str, Any]:
    return {"batch_size": options.batch_size, "heads": options.heads, "device": options.device}


def facts(options, costs: Costs) -> dict[str, Any]:
    return {
        "shape": shape(options),
        "absent": costs.absent,
        "skipped": costs.skipped,
        "matmul_gflops": costs.gflops("mm_gflops"),
        "peak_gflops": costs.gflops("peak_gflops"),
        "targets": [t.as_json() for t in targets(costs, options.heads, options.threads)],
    }


if __name__ == "__main__":
    sys.exit(main())
