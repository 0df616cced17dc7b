"""Plots of attention, drawn without a display."""

from collections.abc import Sequence

from torch import Tensor

from tarnn.extras import needed_for


@needed_for("a plot")
def attention_figure(weights: Tensor, tokens: Sequence[str], title: str = ""):
    """One layer's weights (h, t, s), a panel per head: rows read, columns are read. Few tokens stand on the axes."""
    from matplotlib.figure import Figure

    heads = len(weights)
    wide = min(heads, 4)
    tall = -(-heads // wide)
    figure = Figure(figsize=(3.2 * wide, 3.4 * tall), layout="constrained", dpi=110)
    figure.suptitle(title, fontsize="medium")
    for head, axes in enumerate(figure.subplots(tall, wide, squeeze=False).flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        axes.imshow(weights[head].cpu().numpy(), cmap="Blues", vmin=0, interpolation="nearest")
        axes.set_title(f"head {head}", fontsize="small")
        for axis, size in ((axes.yaxis, weights.shape[1]), (axes.xaxis, weights.shape[2])):
            if len(tokens) == size <= 40:
                axis.set_ticks(range(size), tokens, fontsize=5)
    return figure
