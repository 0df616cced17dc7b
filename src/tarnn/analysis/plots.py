"""Plots of attention, drawn without a display."""

from collections.abc import Sequence

from torch import Tensor

from tarnn.extras import needed_for

DECADES = 2.4  # of shades, as on the page: a 250th of the largest weight is white
FEW = 40  # tokens that stand on the axes


@needed_for("a plot")
def attention_figure(weights: Tensor, tokens: Sequence[str], title: str = ""):
    """Draw one layer's weights (h, t, s), a panel per head: rows read, columns are read.

    Shades are logarithmic, the same for all heads, and a bar says what they are. Up to 40 tokens stand on the axes.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    heads, queries, keys = weights.shape
    wide = min(heads, 4)
    tall = -(-heads // wide)
    side = max(3.0, 0.17 * max(queries, keys)) if max(queries, keys) <= FEW else 3.2
    figure = Figure(figsize=(side * wide + 1, (side + 0.4) * tall + 0.5), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize="medium")
    figure.supylabel("from this token", fontsize="small")
    figure.supxlabel("to this token", fontsize="small")
    largest = max(float(weights.max()), 1e-30)
    shades = LogNorm(largest * 10**-DECADES, largest, clip=True)
    panels = figure.subplots(tall, wide, squeeze=False)
    for head, axes in enumerate(panels.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            weights[head].clamp_min(0).cpu().numpy(), cmap="Blues", norm=shades, interpolation="nearest"
        )
        axes.set_title(f"head {head}", fontsize="small")
        axes.tick_params(labelsize=7)
        for axis, size in ((axes.yaxis, queries), (axes.xaxis, keys)):
            if len(tokens) == size <= FEW:
                axis.set_ticks(range(size), [token[:8] for token in tokens], fontsize=7)
        if len(tokens) == keys <= FEW:
            axes.tick_params(axis="x", rotation=90)
    figure.colorbar(image, ax=list(panels.flat), label="weight", extend="min")
    return figure
