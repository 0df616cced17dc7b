"""The one maker of pictures for pages: a row of panels, one legend below them, readable on a light and on a dark page."""

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which every kind of eye tells apart; three of them darker than theirs, so that each stands out from
# white and from a dark page by at least 3 : 1. The ground is transparent
BLUE, SKY, GREEN, ORANGE, RED, PINK, GREY = (
    "#0072b2",
    "#3c9bd1",
    "#009e73",
    "#bf8400",
    "#d55e00",
    "#cc79a7",
    "#888888",
)
INK = "#777777"  # of letters and frames
ATTENTION = {"linear": BLUE, "softmax": RED, "none": GREY}
MOST_LINES = 7  # with more, nobody finds a line's name
SHADES = 128  # colours of a file, in place of millions: a quarter of the bytes
INKED = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)


def panels(number: int, title: str = "", *, width: float = 4.5, height: float = 3.8) -> tuple[Any, list[Any]]:
    """Return a figure and its axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(INKED):
        figure = Figure(figsize=(width * number, height), layout="constrained", dpi=150)
        figure.suptitle(title, fontsize="medium")
        return figure, list(figure.subplots(1, number, squeeze=False)[0])


def line(
    axes: Any, points: Iterable[tuple[float, float | None]], style: str, label: str | None = None, marker: str = "."
) -> None:
    """Draw a line through what is known and above zero. style: colour and kind of line, as "#0072b2 --"."""
    color, _, dashes = style.partition(" ")
    if known := [(x, y) for x, y in points if y]:
        axes.plot(*zip(*known), linestyle=dashes or "-", color=color, marker=marker, label=label)


def label(axes: Any, x: str, y: str, *, title: str = "", ticks: Sequence[int] = (), scales: str = "log log") -> None:
    """Name the axes, where anything is on them. ticks: lengths, on the x axis."""
    axes.set(xlabel=x, ylabel=y, title=title)
    if axes.lines:  # a logarithmic axis needs something on it
        axes.set(**dict(zip(("xscale", "yscale"), scales.split())))
        if ticks:
            shown = spaced(ticks, logarithmic=scales.startswith("log"))
            names = [f"{t // 1024}k" if t >= 1024 else str(t) for t in ticks]
            axes.set_xticks(ticks, [name if t in shown else "" for t, name in zip(ticks, names)])
            axes.minorticks_off()
    axes.grid(alpha=0.3)


def spaced(ticks: Sequence[int], logarithmic: bool = True, least: float = 0.08) -> set[int]:
    """Return those of the ticks, from the first on, whose labels don't overlap. least: their distance, a part of the axis."""
    places = [math.log(t) if logarithmic else t for t in sorted(ticks)]
    found, gap = [places[0]], least * (places[-1] - places[0])
    for place in places[1:]:
        if place - found[-1] >= gap:
            found.append(place)
    return {t for t, place in zip(sorted(ticks), places) if place in found}


def save(figure: Any, path: Path) -> None:
    """Write a figure of `panels` as PNG, with the names of its lines below it: off the curves, and once for all panels.

    Raises ValueError for more names than `MOST_LINES`: a table shows them all, a picture the ones that matter.
    """
    named = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {name: handle for pair in named for handle, name in zip(*pair)}
    if len(handles) > MOST_LINES:
        raise ValueError(
            f"{path.name} has {len(handles)} lines, at most {MOST_LINES} are readable: {', '.join(handles)}"
        )
    if handles:
        room = 9 * figure.get_figwidth()  # letters, and eight of each name for its line and the gap
        columns = max((n for n in range(2, 5) if width_of([*handles], n) <= room), default=1)
        figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False, labelcolor=INK
        )
    write(figure, path)


def width_of(names: list[str], columns: int) -> int:
    """Return the letters of a legend's columns side by side, each as wide as the longest of its names and eight more."""
    rows = -(-len(names) // columns)
    return sum(max(map(len, names[i : i + rows])) + 8 for i in range(0, len(names), rows))


def write(figure: Any, path: Path) -> None:
    """Draw a figure without a ground into a small PNG."""
    from PIL import Image

    figure.savefig(drawn := io.BytesIO(), transparent=True)
    Image.open(drawn).quantize(SHADES, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
