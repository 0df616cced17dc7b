"""Plots, drawn without a display and written as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tarnn.analysis.decode_cost import DecodeCost

COLORS = {"linear": "#0072b2", "softmax": "#d55e00"}  # told apart by every kind of eye (Okabe and Ito)


def plot_decode_cost(costs: Mapping[str, Sequence[DecodeCost]], path: Path, title: str = "") -> None:
    """Milliseconds a token and bytes of state against position, a line a model, both axes logarithmic.

    `costs`: name of the model → its costs by position. Time: the median and, as a band, the range of rounds.
    """
    from matplotlib.figure import Figure  # a Figure of its own draws with Agg and leaves pyplot's state alone

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    time, size = figure.subplots(1, 2)
    for name, points in costs.items():
        positions, style = (
            [p.position for p in points],
            {"color": COLORS.get(name), "marker": "o", "label": name},
        )
        time.plot(positions, [p.ms for p in points], **style)
        time.fill_between(
            positions,
            [p.ms_min for p in points],
            [p.ms_max for p in points],
            color=COLORS.get(name),
            alpha=0.2,
        )
        size.plot(positions, [p.state_bytes for p in points], **style)
    for axes, label in ((time, "milliseconds a token"), (size, "bytes of state")):
        axes.set(xscale="log", yscale="log", xlabel="position (tokens so far)", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)
