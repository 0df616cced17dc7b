"""Sequences over several processes: what linear attention sends, and what one process has to compute and to hold.

    python benchmarks/sequence_parallel.py      # a minute; benchmarks/results/sequence_parallel.{json,md}

The claims: bytes sent don't depend on the length; each process holds its part of the memory. Causal attention with a decay per
token, 8 heads of 32, forward and backward, one sequence, float32. Processes of one thread, by gloo over this machine's loopback.
With fewer processors than processes, time says what all of them compute together, not how soon they would be done.
Correctness is checked first: outputs and gradients are those of one process.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.sequence_worker import HEAD_DIM, HEADS

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mebibytes, page, source
from scripts.common.targets import Target, at_most, section

FULL = {"processes": [1, 2, 4], "lengths": [512, 2048, 8192], "messages": [2**12, 2**16, 2**20], "rounds": 3}
QUICK = {"processes": [1, 2], "lengths": [64, 256], "messages": [4096], "rounds": 1}
WORKER = Path(__file__).parent / "toolkit" / "sequence_worker.py"
ERROR = 1e-5  # of the largest number
AGREEMENT = 16  # bytes by which processes tell each other, before each op, that they compute the same
Found = dict[str, dict[str, Any]]  # by processes, then as the worker prints it


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK)
    return run(options, measure, facts=facts, report=report)


def measure(options, found: Found, keep) -> None:
    for processes in options.processes:
        found[str(processes)] = ran = start(processes, options)
        if ran["error"] > ERROR:
            raise Unmeasured(f"with {processes} processes results differ by {ran['error']:.1e} of their size")
        print(f"{processes} processes: error {ran['error']:.1e}", flush=True)
        keep()


def start(processes: int, options) -> dict[str, Any]:
    """Run so many workers; return what the first of them prints."""
    settings = json.dumps({name: getattr(options, name) for name in ("lengths", "rounds", "messages")})
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, str(WORKER), str(rank), str(processes), f"{folder}/store", settings]
            for rank in range(processes)
        ]
        workers = [subprocess.Popen(x, stdout=subprocess.PIPE, text=True, env=environment) for x in commands]
        try:
            output = [worker.communicate()[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    if failed := [i for i, worker in enumerate(workers) if worker.returncode]:
        raise Unmeasured(f"process {failed[0]} of {processes} failed")
    return json.loads(output[0])


def formula(processes: int) -> int:
    """Bytes that a process sends: S, z and the sum of the log-decays of each head, to all others, forward and backward."""
    state = HEADS * (HEAD_DIM * (HEAD_DIM + 1) + 1) * 4
    return (processes - 1) * (2 * state + AGREEMENT)


def targets(found: Found) -> list[Target]:
    several = {p: x for p, x in found.items() if p != "1"}
    sent = {
        f"{p} processes, t = {int(t):,}": cell["bytes"] / formula(int(p))
        for p, x in several.items()
        for t, cell in x["attention"].items()
    }
    judged = [at_most("attention sends the bytes of the formula, at every length", "measured", 1.0, sent)]
    if "1" in found:
        longest = max(found["1"]["attention"], key=int)
        whole = found["1"]["attention"][longest]["peak"]
        held = {f"{p} processes": int(p) * x["attention"][longest]["peak"] / whole for p, x in several.items()}
        claim = f"at t = {int(longest):,} a process holds at most 1.2 times its share of the memory"
        judged.append(at_most(claim, "measured", 1.2, held))
    return judged


def facts(options, found: Found) -> dict[str, Any]:
    return {"targets": [t.as_json() for t in targets(found)]}


def report(options, facts: dict[str, Any], found: Found) -> str:
    how = f"Processes have one thread each, and this machine has {os.cpu_count()} processors. Medians of {options.rounds} calls."
    return page(
        "Sequences over several processes",
        source(facts, how),
        section(targets(found)),
        f"## Attention: {HEADS} heads of {HEAD_DIM}, forward and backward",
        table(found),
        "## Messages: an all-gather of so many bytes from each process, in microseconds",
        messages(found),
        f"In the formula a process sends (P − 1) · (2 · 4 · h · (f (d + 1) + 1) + {AGREEMENT}) bytes for each call: S, z and "
        "the sum of log-decays, forward and backward, and by a few more bytes they agree that all compute the same. The "
        "gradients of weights, which any training on several processes sums, are not in it.",
    )


def table(found: Found) -> str:
    rows = []
    for length in next(iter(found.values()))["attention"]:
        for processes, ran in found.items():
            cell = ran["attention"][length]
            sent = formula(int(processes))
            milliseconds = f"{1000 * cell['seconds']:,.1f}"
            rows.append(
                [
                    f"{int(length):,}",
                    processes,
                    milliseconds,
                    f"{cell['bytes']:,.0f}",
                    f"{sent:,}",
                    mebibytes(cell["peak"], 1),
                ]
            )
    return markdown(["t", "processes", "ms", "bytes sent by one", "by the formula", "MiB held by one"], rows)


def messages(found: Found) -> str:
    sizes = sorted({int(n) for ran in found.values() for n in ran["messages"]})
    header = ["processes", *(f"{n:,} bytes" for n in sizes)]
    rows = [
        [processes, *(f"{1e6 * ran['messages'][str(n)]:,.0f}" for n in sizes)]
        for processes, ran in found.items()
        if ran["messages"]
    ]
    return markdown(header, rows)


if __name__ == "__main__":
    sys.exit(main())
