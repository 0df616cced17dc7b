"""Markdown: tables, pages, and how numbers are shown in them."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from scripts.common.others import MOST, TRIES

MIB = 2**20


def markdown(header: str | Sequence[Any], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """A table; the first `left` columns are words and the others numbers. None is shown as a dash.

    header: its cells, or a text with " | " between them.
    """
    header = header.split(" | ") if isinstance(header, str) else header
    rule = ["---"] * left + ["--:"] * (len(header) - left)
    lines = [header, rule, *rows]
    return "\n".join(f"| {' | '.join('–' if x is None else str(x) for x in line)} |" for line in lines)


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", *(part for part in parts if part)]) + "\n"


def source(facts: dict[str, Any], text: str) -> str:
    """The command, what it ran on, and how: the first lines of a benchmark's page."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"`{facts['command']}`\n\n{facts['machine']['cpu']}, {facts['threads']} threads, {facts['date']}; {versions}. "
        f"Kernels: {facts['kernels']}. {text}{others(facts)}"
    )


def others(facts: dict[str, Any]) -> str:
    """What other processes took meanwhile, where that is known."""
    share = facts.get("other_processes") or {}
    if not share.get("figures"):
        return ""
    return (
        f" Other processes took {share['median']:.1%} of the processors in the median, at most {share['most']:.1%}. What was "
        f"above {MOST:.0%} was measured again, up to {TRIES} times in all; {share['above']} of {share['figures']} measurements "
        "stayed above (°)."
    )


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"* {line}" for line in lines) or "Nothing."


def mean_and_error(values: Sequence[float], form: str) -> str | None:
    """Mean ± standard error, in that format; of one value itself, of none a dash."""
    if len(values) < 2:
        return f"{values[0]:{form}}" if values else None
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):{form}} ± {error:{form.lstrip('+')}}"


def milliseconds(timing: Any) -> str | None:
    """Of a Timing or a Cost; with * where it is of one call, with ° where other processes took too much of the processors."""
    if timing is None:
        return None
    marks = "*" * (timing.rounds == 1) + "°" * ((timing.others or 0) > MOST)
    return (f"{timing.ms:.3g}" if timing.ms < 100 else f"{timing.ms:,.0f}") + marks


def ratio(over: Any, under: Any) -> str | None:
    """How many times as long one takes as the other."""
    return f"{over.ms / under.ms:.2f}" if over and under else None


def mebibytes(number: float | None, digits: int = 2) -> str | None:
    return None if number is None else f"{number / MIB:,.{digits}f}"
