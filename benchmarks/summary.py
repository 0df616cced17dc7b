"""What the benchmarks found, in one page of markdown: made from their results, for the README and for release notes.

python benchmarks/summary.py                          # prints it
python benchmarks/summary.py --results runs/benchmarks
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from toolkit.attention_cells import Cell, Costs

from scripts.common.tables import markdown

WIDTH = 64  # the d of the table
SCRIPTS = ("attention", "step", "training_step")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    found = {x: json.loads(p.read_text()) for x in SCRIPTS if (p := options.results / f"{x}.json").exists()}
    if not found:
        print(f"no results of {', '.join(SCRIPTS)} in {options.results}", file=sys.stderr)
        return 1
    print(summary(found))
    return 0


def summary(found: dict[str, dict[str, Any]]) -> str:
    """One section a script, and what was aimed at."""
    sections = {"attention": attention, "step": step, "training_step": training_step}
    parts = [part for name, facts in found.items() for part in (sections[name](facts), _source(name, facts))]
    return "\n\n".join([*parts, targets(found)])


def attention(facts: dict[str, Any]) -> str:
    """Causal, float32: milliseconds of each method at each length from 128 on, and the share of torch.mm's rate."""
    costs = Costs.from_json(facts)
    names = {"native": "tarnn", "chunked": "the same in PyTorch", "sdpa": "SDPA (softmax)"}
    ways = {False: "forward", True: "forward + backward"}
    methods = [m for m in costs.methods if m in names]
    rows = []
    for t in sorted({c.t for c in costs.cells if c.t >= 128 and c.d == WIDTH}):
        found = [costs.get(m, "float32", Cell(t, WIDTH, True, way)) for way in ways for m in methods]
        rows.append([f"{t:,}", *(None if c is None else f"{c.ms:,.2f}" for c in found)])
    head = (
        f"Attention, causal, {facts['shape']['heads']} heads of {WIDTH}, float32, milliseconds "
        "(elu + 1 features, normaliser and, with backward, all gradients):"
    )
    header = ["t", *(f"{names[m]}, {ways[way]}" for way in ways for m in methods)]
    return f"{head}\n\n{markdown(header, rows, left=0)}"


def step(facts: dict[str, Any]) -> str:
    rows = []
    for batch_size, timings in facts["results"].items():
        for name in (x for x in ("tarnn.step", "the operator alone", "copy_") if x in timings):
            shown = "torch's copy_ of a state" if name == "copy_" else name
            middle, least, most = (1000 * timings[name][x] for x in ("ms", "ms_min", "ms_max"))
            rows.append([shown, batch_size, f"{middle:,.1f}", f"{least:,.1f} – {most:,.1f}"])
    return markdown(["one token, state in place", "batch", "µs", "least – most"], rows)


def training_step(facts: dict[str, Any]) -> str:
    methods = list(dict.fromkeys(m for at in facts["results"].values() for m in at))
    rows = [
        [f"{int(t):,}", *(f"{at[m]['ms']:,.0f}" if m in at else None for m in methods)]
        for t, at in facts["results"].items()
    ]
    head = f"A training step of the model of 2020, batch × t = {facts['tokens']:,} tokens, by its attention:"
    return f"{head}\n\n{markdown(['t', *(f'{m}, ms' for m in methods)], rows, left=0)}"


def targets(found: dict[str, dict[str, Any]]) -> str:
    """How many were met, and each that was not, with its worst value."""
    every = [t for facts in found.values() for t in facts["targets"]]
    met, measured = sum(t["met"] is True for t in every), sum(t["met"] is not None for t in every)
    rows = [f"Of {measured} goals that were measured, {met} are met" + ("." if met == measured else "; missed:"), ""]
    for t in (t for t in every if t["met"] is False):
        bound = f"{'≥' if t['at_least'] else '≤'} {t['bound']:g}"
        where = f", at {t['where']}" if t["where"] else ""
        rows.append(f"* {t['claim']} ({t['case']}): {t['worst']:.3g}, wanted {bound}{where}")
    return "\n".join(rows).rstrip()


def _source(name: str, facts: dict[str, Any]) -> str:
    machine = f"{facts['machine']['cpu']}, {facts['threads']} threads"
    return f"(`benchmarks/results/{name}.md`, by `{facts['command']}`; {machine}; {facts['kernels']})"


if __name__ == "__main__":
    sys.exit(main())
