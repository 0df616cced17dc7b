"""When do processes that share a sequence wait for messages longer than they compute? A model of cost, for docs/scale.md.

    python scripts/scale.py                                     # writes the page's tables anew; a test compares
    python scripts/scale.py --flops 3e14 --latency 1e-5 --bandwidth 4e10        # prints the table of these rates

Rates of GPUs are data sheets' and assumptions: no GPU has run this. What CPUs take, `benchmarks/sequence_parallel.py` measures.
The model is of linear attention with one decay per token and a swiglu of 8/3.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "scale.md"
BEGIN, END = "<!-- {}: written by scripts/scale.py -->\n", "<!-- end of {} -->\n"
PROCESSES, WIDTHS = (8, 64, 256, 1024), (256, 1024, 4096, 8192)
HEAD_DIM, CHUNK = 64, 128


class Rates(NamedTuple):
    """Of one process, and of the links between processes."""

    flops: float  # a second, that a training step reaches
    latency: float  # seconds until a message of no length is there
    bandwidth: float  # bytes a second that a process sends
    size: int = 4  # bytes per number of a state


GPUS = {"8 GPUs of one node": Rates(0.4 * 989e12, 5e-6, 450e9), "GPUs of many nodes": Rates(0.4 * 989e12, 15e-6, 50e9)}


def flops_per_token(width: int, head_dim: int = HEAD_DIM) -> float:
    """Of one layer, forward and backward: products with 12 width² weights; attention in chunks, with what a stretch's end
    costs: its state is computed twice."""
    attention = width * (
        2 * CHUNK + 6 * head_dim
    )  # scores and values in a chunk; reading a state, and writing it twice
    return 3 * (2 * 12 * width**2 + attention)


def state_bytes(width: int, head_dim: int = HEAD_DIM, size: int = 4) -> float:
    """Of one layer: S, z and the sum of log-decays of each head."""
    return width / head_dim * (head_dim * (head_dim + 1) + 1) * size


def message_seconds(processes: int, rates: Rates, nbytes: float, tree: bool = False) -> float:
    """Of an all-gather: from neighbour to neighbour, P − 1 times, or with latencies as few as a tree's."""
    steps = math.ceil(math.log2(processes)) if tree else processes - 1
    return steps * rates.latency + (processes - 1) * nbytes / rates.bandwidth


def waiting_seconds(processes: int, rates: Rates, width: int, tree: bool = False, head_dim: int = HEAD_DIM) -> float:
    """Of one layer: the exchange of ends, that of their gradients, and the few bytes of agreement before."""
    nbytes = state_bytes(width, head_dim, rates.size)
    return sum(message_seconds(processes, rates, n, tree) for n in (16, nbytes, nbytes))


def break_even(processes: int, rates: Rates, width: int, tree: bool = False) -> int:
    """Tokens per process for which computing takes as long as waiting."""
    seconds = flops_per_token(width) / rates.flops
    return math.ceil(waiting_seconds(processes, rates, width, tree) / seconds)


def break_even_table(rates: Rates, processes: tuple[int, ...] = PROCESSES) -> str:
    """Rows: processes; columns: widths; tokens per process, by neighbours / by a tree."""
    rows = [
        [f"{p:,}", *(f"{break_even(p, rates, h):,} / {break_even(p, rates, h, tree=True):,}" for h in WIDTHS)]
        for p in processes
    ]
    return table(["processes", *(f"width {h:,}" for h in WIDTHS)], rows)


def bytes_table() -> str:
    """What one process sends per layer and step, beside what softmax attention's keys and values would be."""
    rows = []
    for p in PROCESSES:
        for h in (1024, 4096):
            state = 2 * (p - 1) * state_bytes(h)
            keys = [2 * (p - 1) * 2 * n * h * 2 for n in (8192, 131072)]  # k and v, and their gradients, in bfloat16
            gathered = p * state_bytes(h)
            rows.append([f"{p:,}", f"{h:,}", *map(megabytes, (state, *keys, gathered))])
    columns = [
        "linear attention sends",
        "softmax, 8,192 tokens each",
        "softmax, 131,072 each",
        "ends that a process holds",
    ]
    return table(["processes", "width", *columns], rows)


def rates_table() -> str:
    rows = [
        [name, f"{x.flops / 1e12:,.3g}", f"{1e6 * x.latency:,.3g}", f"{x.bandwidth / 1e9:,.3g}"]
        for name, x in GPUS.items()
    ]
    return table(["", "TFLOP/s of a step", "µs per message", "GB/s per process"], rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def megabytes(number: float) -> str:
    return f"{number / 1e6:,.1f} MB" if number < 1e9 else f"{number / 1e9:,.1f} GB"


def with_tables(text: str) -> str:
    """The page with the tables of the model."""
    parts = {"rates": rates_table(), "bytes": bytes_table()}
    for i, rates in enumerate(GPUS.values()):
        parts[f"gpus-{i + 1}"] = break_even_table(rates, (2, 4, 8) if i == 0 else PROCESSES)
    for name, part in parts.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}{part}{end}{rest.split(end)[1]}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("flops", "FLOP/s"), ("latency", "seconds"), ("bandwidth", "bytes/s")):
        parser.add_argument(f"--{name}", type=float, help=f"{what} that you measured")
    options = parser.parse_args()
    given = [options.flops, options.latency, options.bandwidth]
    if any(given):
        if not all(x is not None and x > 0 for x in given):
            parser.error("--flops, --latency and --bandwidth go together, and are numbers above 0.")
        print(break_even_table(Rates(*given)), end="")
        return 0
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
