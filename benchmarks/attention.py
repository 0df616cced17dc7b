"""Time and memory of attention against length: tarnn's native kernels, the same in chunked PyTorch, torch's SDPA.

    python benchmarks/attention.py           # ten to twelve minutes on two cores; benchmarks/results/attention.{json,md,png}
    python benchmarks/attention.py --quick   # half a minute; runs/benchmarks/attention.{json,md,png}

The claim: linear attention costs t and not t², and native kernels do it near the speed of torch.mm, in almost no
memory. Forward, and forward with backward; causal and not; float32 and bfloat16; d = e = 32, 64, 128. All rivals
run in one process on the same inputs, in turns. Correctness is checked first; nothing is measured of what is wrong.
What would take too long or too much memory, by a shorter length's figures, is left out and listed. Results are
written after each cell: Ctrl-C keeps them, `--resume` goes on. fast-transformers and performer-pytorch take part
where they are installed.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from attention_cells import draw_inputs, measure_cell, too_much
from attention_check import wrong
from attention_costs import Cell, Cost, Costs, resumed, save
from attention_report import plot, report
from attention_targets import targets
from clock import Effort
from provenance import kernels, provenance, results_folder
from rivals import Rival, field
from targets import summary

LENGTHS = (1, 16, 64, 128, 256, 1024, 4096, 16384, 65536)
HEAD_DIMS, DTYPES = (32, 64, 128), ("float32", "bfloat16")
QUICK = {"lengths": [64, 256, 1024, 4096], "head_dims": [64], "seconds": 0.3}
Entrant = tuple[Rival, str]  # who, and in which dtype


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    begun, interrupted = time.perf_counter(), False
    path = options.out / "attention.json"
    try:
        entrants, absent = entrants_of(options)
        facts = facts_of(options, absent)
        costs = resumed(path, facts) if options.resume and path.exists() else Costs()
    except ValueError as error:
        print(f"nothing is measured: {error}", file=sys.stderr)
        return 1
    print(f"{facts['machine']['cpu']}, {facts['threads']} threads; kernels: {facts['kernels']}")
    for name, why in absent.items():
        print(f"without {name}: {why}")
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        measure(entrants, costs, options, lambda: save(path, facts, costs))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted: what was measured is kept; --resume goes on", file=sys.stderr)
    if costs.by:
        write(options, facts, costs)
    print(f"{(time.perf_counter() - begun) / 60:.1f} minutes")
    return 130 if interrupted else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a few cells, half a minute")
    add("--resume", action="store_true", help="go on where the results file ends")
    add("--out", type=Path, help="folder; benchmarks/results for the whole run, else runs/benchmarks")
    add("--rivals", nargs="+", metavar="NAME", help="only these, such as native sdpa")
    add("--lengths", type=int, nargs="+", default=LENGTHS)
    add("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    add("--dtypes", nargs="+", choices=("float32", "bfloat16", "float16"), default=DTYPES)
    add("--kinds", nargs="+", choices=("causal", "full"), default=("causal", "full"))
    add("--passes", nargs="+", choices=("forward", "both"), default=("forward", "both"))
    add("--heads", type=int, default=8)
    add("--batch-size", type=int, default=1)
    add("--threads", type=int, help="torch's own choice by default")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=float, default=2.5, help="about so long, at most, for all rounds of one rival")
    add("--longest-call", type=float, default=12.0, help="seconds beyond which a rival is left out")
    whole = vars(parser.parse_args([]))
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    options = parser.parse_args()
    chosen = {name for name, value in vars(options).items() if value != whole[name]}
    options.out = options.out or results_folder(whole=chosen <= {"resume", "threads"})
    return options


def entrants_of(options) -> tuple[list[Entrant], dict[str, str]]:
    """(who takes part in which dtype, who doesn't and why); ValueError for who isn't known, and where ours are wrong."""
    rivals, absent = field(options.device)
    names = [r.name for r in rivals]
    if unknown := set(options.rivals or names) - {*names, *absent}:
        raise ValueError(
            f"no rival is called {', '.join(unknown)}; there are {', '.join((*names, *absent))}."
        )
    entrants = []
    for rival in (r for r in rivals if r.name in (options.rivals or names)):
        for dtype in (["float64"] if rival.ours else []) + list(options.dtypes):
            found = wrong(rival, getattr(torch, dtype), options.head_dims, options.device)
            if found and rival.ours:
                raise ValueError(f"the check is red: {rival.name}, {found}.")
            if found:
                absent[f"{rival.name} in {dtype}"] = found
            elif dtype in options.dtypes:
                entrants.append((rival, dtype))
    return entrants, absent


def facts_of(options, absent: dict[str, str]) -> dict[str, Any]:
    return {
        **provenance(),
        "kernels": kernels(),
        "shape": {"batch_size": options.batch_size, "heads": options.heads, "device": options.device},
        "absent": absent,
    }


def measure(entrants: list[Entrant], costs: Costs, options, keep: Callable[[], None]) -> None:
    """Every cell not yet there, short ones first, each printed and kept as soon as it is known."""
    effort = Effort(min(0.03, options.seconds / 3), options.seconds)
    for t, d in product(sorted(set(options.lengths)), options.head_dims):
        inputs = draw_inputs(t, d, options.dtypes, options.batch_size, options.heads, options.device)
        for kind, way in product(options.kinds, options.passes):
            cell, able = Cell(t, d, kind == "causal", way == "both"), []
            for rival, dtype in entrants:
                if costs.get(rival.name, dtype, cell):
                    continue
                if why := too_much(rival, dtype, cell, costs, options.longest_call):
                    costs.skip(rival.name, dtype, cell, why)
                    print(f"{cell}, {cell.kind}: without {rival.name} in {dtype}: {why}")
                else:
                    able.append((rival, dtype))
            if able:
                found = measure_cell(cell, inputs, able, effort, options.device)
                for cost in found:
                    costs.add(cost)
                keep()
                show(cell, found)


def show(cell: Cell, costs: list[Cost]) -> None:
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
    times = "  ".join(f"{c.rival} {short[c.dtype]} {c.ms:.4g}" for c in costs)
    mm = "" if costs[0].mm_gflops is None else f"  (mm {costs[0].mm_gflops:.0f} GFLOP/s)"
    print(f"{f'{cell}, {cell.kind}:':54}{times} ms{mm}", flush=True)


def write(options, facts: dict[str, Any], costs: Costs) -> None:
    rates = {c.cell: c.mm_gflops for c in costs.by.values() if c.mm_gflops}
    facts["matmul_gflops"] = {
        "median": statistics.median(rates.values()) if rates else None,
        "least": min(rates.values(), default=None),
        "most": max(rates.values(), default=None),
        "cells": len(rates),
    }
    chunk = kernel_chunk()
    found = targets(costs, options.heads, chunk, facts["threads"])
    facts |= {"chunk": chunk, "targets": [t.as_json() for t in found]}
    save(options.out / "attention.json", facts, costs)
    (options.out / "attention.md").write_text(report(facts, costs, found, chunk))
    title = f"{options.heads} heads; {facts['machine']['cpu']}, {facts['threads']} threads"
    widths = sorted({c.d for c in costs.cells})
    plot(costs, options.out / "attention.png", title, 64 if 64 in widths else widths[0])
    print(f"targets: {summary(found)}")
    print(*(options.out / f"attention.{x}" for x in ("json", "md", "png")), sep="\n")


def kernel_chunk() -> int:
    """Positions that the native kernel takes at once; 32 where it doesn't say."""
    try:
        from tarnn.kernels.cpu import CHUNK
    except ImportError:
        return 32
    return CHUNK


if __name__ == "__main__":
    sys.exit(main())
