"""Tables of error rates: tasks, methods and seeds, with intervals.

What is shown is, by task, {"symbols": of each test utterance, "methods": {method: {seed: {"edits": of each test utterance, …}}}}.
"""

from collections.abc import Iterable
from typing import Any

from measures.intervals import Errors
from scripts.common.tables import markdown


def errors_of(task: dict[str, Any], method: str) -> Errors:
    return Errors([one["edits"] for one in task["methods"][method].values()], task["symbols"])


def errors_table(
    tasks: dict[str, Any], epochs: dict[str, dict[str, float]], paper: dict[str, dict[str, tuple[float, int]]]
) -> str:
    """Each method's mean over seeds. epochs: seconds of one epoch; paper: its error and seconds; by task and method."""
    rows = []
    for name, task in tasks.items():
        for method, runs in task["methods"].items():
            rate, one = errors_of(task, method).rate(), next(iter(runs.values()))
            seconds = epochs.get(name, {}).get(method)
            row = [
                name,
                method,
                f"{rate.mean:.1f}",
                f"{rate.low:.1f} to {rate.high:.1f}",
                ", ".join(f"{100 * sum(x['edits']) / sum(task['symbols']):.1f}" for x in runs.values()),
                f"{one['rate']:g}",
                seconds and f"{seconds:.1f}",
                f"{one['parameters']:,}",
            ]
            rows.append([*row, *paper.get(name, {}).get(method, (None, None))])
    header = ["task", "method", "error", "95 %", "by seed", "rate", "s per epoch", "parameters"]
    return markdown([*header, "paper: PER", "paper: s per epoch"], rows, left=2)


def differences_table(tasks: dict[str, Any], compared: Iterable[tuple[str, str]]) -> str:
    """By how many points the first of two methods errs more, on the same utterances."""
    rows = []
    for name, task in tasks.items():
        for first, second in compared:
            if {first, second} <= set(task["methods"]):
                points = errors_of(task, first).above(errors_of(task, second))
                verdict = "undecided" if not points.decided else "fewer errors" if points.mean < 0 else "more errors"
                span = f"{points.low:+.1f} to {points.high:+.1f}"
                rows.append([name, f"{first} − {second}", verdict, f"{points.mean:+.1f}", span])
    return markdown(["task", "methods", "verdict", "points", "95 %"], rows, left=3)


def rates_table(found: dict[str, dict[str, float]]) -> str:
    """Errors by method and learning rate."""
    rates = list(dict.fromkeys(rate for errors in found.values() for rate in errors))
    rows = [[method, *(f"{errors[x]:.1f}" if x in errors else None for x in rates)] for method, errors in found.items()]
    return markdown(["method", *rates], rows)
