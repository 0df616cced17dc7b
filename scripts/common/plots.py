"""Figures of one row of panels, drawn without a display, in colours that every kind of eye tells apart (Okabe and Ito)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

BLUE, SKY, GREEN, ORANGE, RED, PINK, GREY = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#999999",
)
ATTENTION = {"linear": BLUE, "softmax": RED, "none": GREY}


def panels(number: int, title: str = "", *, width: float = 4.5, height: float = 3.8) -> tuple[Any, list[Any]]:
    """(figure, its axes)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * number, height), layout="constrained", dpi=150)
    figure.suptitle(title, fontsize="medium")
    return figure, list(figure.subplots(1, number, squeeze=False)[0])


def line(
    axes: Any, points: Iterable[tuple[float, float | None]], style: str, label: str | None = None, marker: str = "."
) -> None:
    """A line through what is known and above zero. style: colour and kind of line, as "#0072b2 --"."""
    color, _, dashes = style.partition(" ")
    if known := [(x, y) for x, y in points if y]:
        axes.plot(*zip(*known), linestyle=dashes or "-", color=color, marker=marker, label=label)


def label(
    axes: Any,
    x: str,
    y: str,
    *,
    title: str = "",
    ticks: Sequence[int] = (),
    scales: str = "log log",
    legend: str | None = None,
) -> None:
    """What the axes are, where anything is on them; ticks: lengths, on the x axis. legend: its title."""
    axes.set(xlabel=x, ylabel=y, title=title)
    if axes.lines:  # a logarithmic axis needs something on it
        axes.set(**dict(zip(("xscale", "yscale"), scales.split())))
        if ticks:
            shown = spaced(ticks, logarithmic=scales.startswith("log"))
            names = [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks]
            axes.set_xticks(ticks, [name if t in shown else "" for t, name in zip(ticks, names)])
            axes.minorticks_off()
    axes.grid(alpha=0.3)
    if legend is not None:
        axes.legend(frameon=False, title=legend or None, fontsize="small")


def spaced(ticks: Sequence[int], logarithmic: bool = True, least: float = 0.08) -> set[int]:
    """Those of the ticks, from the first on, that lie so far apart that their labels don't overlap: a part of the axis."""
    places = [math.log(t) if logarithmic else t for t in sorted(ticks)]
    found, gap = [places[0]], least * (places[-1] - places[0])
    for place in places[1:]:
        if place - found[-1] >= gap:
            found.append(place)
    return {t for t, place in zip(sorted(ticks), places) if place in found}
