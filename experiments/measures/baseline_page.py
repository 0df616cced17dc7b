"""The page and the picture of `baseline_table.py`."""

import statistics
from typing import Any

from measures.attentions import MOST, ROWS, SHOWN
from scripts.common.clock import Timing
from scripts.common.plots import INK, label, line, panels
from scripts.common.tables import MIB, markdown, mebibytes, milliseconds, page, source

LEAKS = (
    "Not causal: which earlier keys a query sees depends on later tokens, which move single earlier outputs by half to all of "
    "their size."
)
SIDES = {"back": "a decoder's layer", "both": "an encoder's layer"}


def report(options, facts, results: dict[str, Any]) -> str:
    costs = [markdown(*cost_table(side, rows)) for side, rows in results["cost"].items() if any(rows.values())]
    parts = [source(facts, "")]
    if costs:
        text = (
            f"Forward and backward of one layer with its projections, {options.cost_hidden} wide, {options.cost_heads} heads, "
            f"one sequence, float32. *: of one call. {LEAKS}"
        )
        parts += ["## What each costs", text, *costs]
    tables = {part: learned_table(part, results["quality"]) for part in ("short", "long")}
    if any(tables.values()):
        text = (
            f"{options.layers} layers, {options.hidden} wide, {options.heads} heads, sinusoidal positions. A dash: an attention "
            "that is never causal has no decoder's task, or the run has not been made."
        )
        parts += ["## What each learns", text]
    if tables["short"]:
        parts += [f"After {options.minutes:g} minutes of processor time, one seed:", tables["short"]]
    if tables["long"]:
        text = "the mean over the seeds, and the least and the most"
        parts += [f"After {options.minutes_most:g} minutes of processor time, {text}:", tables["long"]]
    return page(
        "Linear attention against its baselines",
        "![time and memory of seven attentions, by tokens](baseline_table.png)" if costs else "",
        *parts,
    )


def cost_table(side: str, rows: dict[str, dict[str, Timing]]) -> tuple[list[str], list[list[Any]]]:
    lengths = sorted({int(n) for found in rows.values() for n in found})
    header = [SIDES[side], *(f"{named(n)}: ms" for n in lengths), *(f"{named(n)}: MiB" for n in lengths)]
    lines = []
    for row in ROWS:
        if known := rows.get(row):
            times = [known.get(str(n)) for n in lengths]
            sizes = [x and mebibytes(x.peak_bytes, 1) for x in times]
            lines.append([called(row, side == "back"), *map(milliseconds, times), *sizes])
    return header, lines


def called(row: str, causal: bool) -> str:
    return f"{row} (not causal)" if causal and ROWS[row].leaks else row


def named(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def learned_table(part: str, quality: dict[str, Any]) -> str:
    """Empty where nothing was trained."""
    tasks = {name: found for name, found in quality.items() if found.get(part)}
    if not tasks:
        return ""
    header = ["attention", *(f"{name}: {found['unit']}" for name, found in tasks.items())]
    guess = ["guessing", *(f"{found['guess']:.{digits(found)}f}" for found in tasks.values())]
    cells = {row: [shown(found, part, row) for found in tasks.values()] for row in ROWS}
    causal = any(found["causal"] for found in tasks.values())
    return markdown(header, [guess, *([called(row, causal), *x] for row, x in cells.items() if any(x))])


def scores(found: dict[str, Any], part: str, row: str) -> list[float]:
    """What the runs of a row ended with, by seed."""
    return [x["curve"][-1]["score"] for x in found.get(part, {}).get(row, {}).values()]


def shown(found: dict[str, Any], part: str, row: str) -> str | None:
    values = scores(found, part, row)
    if not values:
        return None
    text = f"{statistics.mean(values):.{digits(found)}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits(found)}f} to {max(values):.{digits(found)}f})"
    return text if learned(found, values) else f"{text}, nothing learned"


def learned(found: dict[str, Any], values: list[float]) -> bool:
    """Whether their mean is better than guessing, by more than two standard errors of the test."""
    gain = statistics.mean(values) - found["guess"]
    return (gain if found["more_is_better"] else -gain) > found["margin"]


def digits(found: dict[str, Any]) -> int:
    return 1 if found["more_is_better"] else 3


def figure(options, facts, results: dict[str, Any]):
    """Draw time and memory of the best known against length, decoders' layers where there are any, and accuracy of all against
    speed, with memory as size.
    """
    tasks = [found for found in results["quality"].values() if found.get("short") and not found["causal"]]
    made, (time, memory, *arena) = panels(3 if tasks else 2, width=5.2, height=4.8)
    kinds = {"back": results["cost"].get("back", {}), "both": results["cost"].get("both", {})}
    costs = {row: kinds["back"].get(row) or kinds["both"].get(row) or {} for row in ROWS}
    for row, known in ((x, costs[x]) for x in SHOWN):
        points = sorted((int(n), x) for n, x in known.items())
        line(time, ((n, x.ms) for n, x in points), ROWS[row].style, row)
        line(memory, ((n, x.peak_bytes and x.peak_bytes / MIB) for n, x in points), ROWS[row].style, row)
    label(time, "tokens", "milliseconds, forward and backward", ticks=options.lengths)
    label(memory, "tokens", "peak MiB", ticks=options.lengths)
    if tasks:
        draw_arena(*arena, tasks, results["cost"])
    return made


def draw_arena(arena, tasks: list[dict[str, Any]], costs: dict[str, Any]) -> None:
    """Accuracy against speed; the size of a disc shows memory."""
    for row in ROWS:
        values = [scores(found, "short", row) for found in tasks]
        known = costs.get("both", {}).get(row) or costs.get("back", {}).get(row) or {}
        at = known.get("4096") or next(iter(known.values()), None)
        if at is not None and values and all(values):
            place = 1000 / at.ms, statistics.mean(x[-1] for x in values)
            bold = "bold" if row in MOST else None
            arena.scatter(
                *place, s=20 * ((at.peak_bytes or MIB) / MIB) ** 0.5, color=ROWS[row].style.split()[0], alpha=0.6
            )
            arena.annotate(
                row, place, fontsize="x-small", color=INK, weight=bold, xytext=(3, 3), textcoords="offset points"
            )
    arena.set(xlabel="steps per second, 4,096 tokens", ylabel="mean accuracy of the encoder's tasks, %", xscale="log")
    arena.grid(alpha=0.3)
