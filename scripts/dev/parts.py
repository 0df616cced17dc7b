"""Where the native kernels' time goes: features, products within a chunk, the state, loads and stores.

    python scripts/dev/parts.py                        # two minutes; scripts/dev/results/parts.{json,md}
    python scripts/dev/parts.py --head-dims 128 --lengths 65536 --kinds causal --passes both

Needs Linux with perf, addr2line, cmake and a compiler. The kernels are built once more into runs/parts, with line
numbers and frame pointers and otherwise the same flags; perf samples this process while it repeats one call; each
sample is counted for the first of its functions, from the innermost outwards (inlined ones too), that the table below
gives to a part. Page faults, of memory that results are the first to touch, are a part of their own wherever they happen.
Samples that no kernel is in are overhead: the op around it, allocation, Python, threads that wait.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from toolkit.attention_cells import Cell, call, draw_inputs
from toolkit.baselines import Method, tarnn_attend

from scripts.common.options import ROOT, parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page, source
from tarnn.kernels.cpu import library

FULL = {
    "lengths": [4096],
    "head_dims": [32, 64, 128],
    "dtypes": ["float32"],
    "kinds": ["causal", "full"],
    "passes": ["forward", "both"],
    "heads": 8,
    "seconds": 3.0,
}
CHOICES = {"dtypes": ["float32", "bfloat16", "float16"], "kinds": ["causal", "full"], "passes": ["forward", "both"]}
BUILD = ROOT / "runs" / "parts"
NEEDED = ("perf", "addr2line", "cmake")
SAMPLES_A_SECOND = 999
FAULTS = "page faults"
PARTS = {  # part: functions of csrc/; those of a fused product count together
    "features": r"feature|features_backward|exp_tile|exp_nonpositive",
    "normaliser": r"store_denominators|stream_denominators|pass_normaliser|add_normaliser|output_factor|scale_rows|scale_columns",
    "in-chunk": r"pairs|mask_pairs|channel_pairs|pair_gradients|matmul<\(tarnn::\w+::Part\)[1-9]\w*, \w+>",
    "tokens over the state": r"pass|pass_by|pass_all",
    "state": r"absorb|decay_state|decay|join|join_gradients|sum_gradients|matmul<\(tarnn::\w+::Part\)0, \w+>|add_outer|add_rows",
    "loads and stores": r"load_\w+|store_\w+|read_state|write_state|get_state|put_state|copy_to",
    "transposes": r"transpose\w*",
    "weights": r"chunk_weights|weighted_queries|weigh_pairs|weigh_rows|multiply",
}
OTHER, OVERHEAD = "rest of the kernels", "overhead"
PATTERNS = {FAULTS: re.compile(r"^(asm_exc_page_fault|__x64_sys_munmap)$")}
PATTERNS |= {part: re.compile(rf"tarnn::\w+::(?:\w+<\w+>::)?({names})(<|\(|$)") for part, names in PARTS.items()}
# a product's own frame may be gone, by a jump in place of a call; then these are left, with the same template argument
PIECES = {
    "state": re.compile(r"tarnn::\w+::product<\(tarnn::\w+::Part\)0"),
    "in-chunk": re.compile(r"tarnn::\w+::product<\(tarnn::\w+::Part\)[1-9]"),
}
Frames = list[str]  # function names of a sample, the innermost first


def main() -> int:
    options = parse(__file__, __doc__, FULL, choices=CHOICES, about={"seconds": "of sampling each cell"})
    return run(options, measure, results=[], report=report)


def measure(options, rows: list[dict[str, Any]], keep) -> None:
    if missing := [x for x in NEEDED if shutil.which(x) is None]:
        raise Unmeasured(f"parts.py needs {', '.join(NEEDED)}; not found: {', '.join(missing)}.")
    try:
        binary = build()
        os.environ["TARNN_BINARY"] = str(binary)  # read when the kernels are first asked for: now
        if not library.available():
            raise Unmeasured(f"no native kernels to look into: {library.status().why}.")
        for cell, dtype in cells_of(options):
            ms, samples = sampled(cell, dtype, binary, options)
            shares, others = parts_of(samples)
            found = {"dtype": dtype, "ms": ms, "samples": len(samples), "shares": shares, "others": others}
            rows.append({**cell._asdict(), **found})
            keep()
            shown = "  ".join(f"{part} {share:.0%}" for part, share in shares.items())
            print(f"{cell}, {cell.kind}, {dtype}: {ms:.2f} ms: {shown}", flush=True)
    except subprocess.CalledProcessError as error:
        raise Unmeasured(f"{' '.join(map(str, error.cmd))}\n{error.stdout or ''}{error.stderr or ''}") from error


def cells_of(options) -> Iterable[tuple[Cell, str]]:
    for dtype, d, t, kind, way in product(
        options.dtypes, options.head_dims, options.lengths, options.kinds, options.passes
    ):
        yield Cell(t, d, kind == "causal", way == "both"), dtype


def build() -> Path:
    """The kernels with line numbers and frame pointers; what is up to date is left alone."""
    BUILD.mkdir(parents=True, exist_ok=True)
    flags = "-DCMAKE_CXX_FLAGS=-g1 -fno-omit-frame-pointer -fno-optimize-sibling-calls"
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), flags]
    for command in (configure, ["cmake", "--build", str(BUILD), "--target", "tarnn_cpu"]):
        subprocess.run(command, check=True, capture_output=True, text=True)
    return BUILD / "libtarnn_cpu.so"


def sampled(cell: Cell, dtype: str, binary: Path, options) -> tuple[float, list[Frames]]:
    """(milliseconds a call, samples) of this process, which repeats the cell's call for as long as perf looks."""
    *inputs, grad = draw_inputs(cell.t, cell.d, [dtype], 1, options.heads, "cpu")[dtype]
    f = call(Method("native", tarnn_attend), inputs, grad, cell)
    f()  # also starts the threads, which perf has to find
    data = BUILD / "perf.data"
    perf = [
        "perf",
        "record",
        "-q",
        "-e",
        "cpu-clock",
        "-F",
        str(SAMPLES_A_SECOND),
        "--call-graph",
        "fp",
        "-o",
        str(data),
        "-p",
        str(os.getpid()),
        "--",
        "sleep",
        str(options.seconds),
    ]
    with subprocess.Popen(perf, stderr=subprocess.PIPE, text=True) as looking:
        start, calls = time.perf_counter(), 0
        while looking.poll() is None:
            f()
            calls += 1
        ms = 1000 * (time.perf_counter() - start) / calls
        if looking.returncode:
            raise subprocess.CalledProcessError(looking.returncode, perf, stderr=looking.stderr.read())
    return ms, frames_of(data, binary)


def frames_of(data: Path, binary: Path) -> list[Frames]:
    """The samples, with inlined functions of the library among their frames."""
    script = ["perf", "script", "-i", str(data), "--no-inline", "-F", "ip,sym,dso"]
    text = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    samples = [[_frame(line) for line in x.splitlines() if line.strip()] for x in text.split("\n\n")]
    ours = {address for sample in samples for address, _, dso in sample if dso == str(binary)}
    names = inlined_names(sorted(ours), binary)
    return [
        [name for address, symbol, dso in sample for name in names.get(address, [symbol] if dso != str(binary) else [])]
        for sample in samples
        if sample
    ]


def _frame(line: str) -> tuple[str, str, str]:
    """(address, symbol, file) of `   6cd0 (anonymous namespace)::run (/…/libtarnn_cpu.so)`."""
    address, _, rest = line.strip().partition(" ")
    symbol, _, dso = rest.rpartition(" (")
    return address, symbol, dso.removesuffix(")")


def inlined_names(addresses: Sequence[str], binary: Path) -> dict[str, Frames]:
    """At each address, the functions that are inlined there, and the one that they are inlined into."""
    # an address behind a call is of the next line: one less is of the call
    asked = "\n".join(f"0x{int(x, 16) - 1:x}" for x in addresses)
    command = ["addr2line", "-a", "-i", "-f", "-C", "-e", str(binary)]
    lines = subprocess.run(command, input=asked, check=True, capture_output=True, text=True).stdout.splitlines()
    names: list[Frames] = []
    for line in lines:
        if line.startswith("0x"):
            names.append([])
            is_name = True
            continue
        if is_name:
            names[-1].append(line)
        is_name = not is_name
    return dict(zip(addresses, names, strict=True))


def part_of(frames: Frames) -> str:
    for patterns in (PATTERNS, PIECES):
        for frame in frames:
            for part, pattern in patterns.items():
                if pattern.search(frame):
                    return part
    return OTHER if any("tarnn::" in frame for frame in frames) else OVERHEAD


def parts_of(samples: Sequence[Frames]) -> tuple[dict[str, float], dict[str, float]]:
    """(share of the samples by part, and of what no part claims by innermost function, the largest five)."""
    parts = Counter(part_of(x) for x in samples)
    others = Counter(x[0] for x in samples if x and part_of(x) in (OTHER, OVERHEAD))
    total = max(1, len(samples))
    order = [*PARTS, FAULTS, OTHER, OVERHEAD]
    return (
        {part: parts[part] / total for part in order if parts[part]},
        {name: n / total for name, n in others.most_common(5)},
    )


def report(options, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    parts = [part for part in (*PARTS, FAULTS, OTHER, OVERHEAD) if any(part in r["shares"] for r in rows)]
    head = ["dtype", "causal", "pass", "d", "t", "ms", *(f"{part}, ms" for part in parts)]
    lines = []
    for r in rows:
        cell = Cell.of(r)
        shares = [r["shares"].get(part, 0.0) for part in parts]
        row = [r["dtype"], "yes" if cell.causal else "no", cell.way, cell.d, f"{cell.t:,}", f"{r['ms']:.2f}"]
        lines.append([*row, *(f"{share * r['ms']:.2f} ({share:.0%})" for share in shares)])
    how = (
        f"With line numbers and frame pointers. Batch 1, {options.heads} heads. Milliseconds per call times the share of "
        "perf's samples; of all threads, so that waiting is in the overhead."
    )
    return page("Where the native kernels' time goes", source(facts, how), markdown(head, lines, left=3))


if __name__ == "__main__":
    sys.exit(main())
