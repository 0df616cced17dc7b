"""The cost of a token against its position, drawn without a display."""

from collections.abc import Mapping, Sequence

from scripts.common.decode_cost import DecodeCost

COLORS = {"linear": "#0072b2", "softmax": "#d55e00"}  # told apart by every kind of eye (Okabe and Ito)
LINES = ("-", "--", ":", "-.")


def decode_cost_figure(costs: Mapping[str, Sequence[DecodeCost]], title: str = ""):
    """Milliseconds per token and bytes of state against position, one line per model, both axes logarithmic.

    `costs`: name → costs by position; the first word of a name, "linear" or "softmax", gives its colour.
    Time is the median of the rounds, with their range as a band.
    """
    from matplotlib.figure import Figure  # a Figure of its own draws with Agg and leaves pyplot's state alone
    from matplotlib.ticker import EngFormatter, NullFormatter, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(9, 3.8), layout="constrained", dpi=150)
    time, size = figure.subplots(1, 2)
    kinds = [name.split(",")[0].split()[0] for name in costs]
    for i, (name, points) in enumerate(costs.items()):
        at, color = [p.position for p in points], COLORS.get(kinds[i], "#555555")
        style = {"color": color, "linestyle": LINES[kinds[:i].count(kinds[i]) % len(LINES)], "label": name}
        time.plot(at, [p.ms for p in points], marker="o", **style)
        time.fill_between(at, [p.ms_min for p in points], [p.ms_max for p in points], color=color, alpha=0.15)
        size.plot(at, [p.state_bytes for p in points], marker="o", **style)
    positions = sorted({p.position for points in costs.values() for p in points})
    for axes, label in ((time, "milliseconds per step (a token per row)"), (size, "bytes of state")):
        axes.set(xscale="log", yscale="log", xlabel="position (tokens so far)", ylabel=label)
        axes.set_xticks(positions, [f"{p // 1024}k" if p % 1024 == 0 else str(p) for p in positions])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(alpha=0.3)
    time.legend(frameon=False)
    time.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    time.yaxis.set_minor_formatter(NullFormatter())
    size.yaxis.set_major_formatter(EngFormatter(unit="B"))
    figure.suptitle(title, fontsize="medium")
    return figure
