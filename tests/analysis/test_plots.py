"""The plot of a layer's attention: its axes, shades and tokens."""

import pytest
import torch

from tarnn.analysis.plots import DECADES, attention_figure


def drawn(length, heads=4):
    weights = torch.rand(heads, length, length, generator=torch.Generator().manual_seed(0)).tril()
    weights[:, 0, 0] = 1
    figure = attention_figure(weights, [f"tok{i}" for i in range(length)], "layer 0")
    figure.canvas.draw()
    panels = [axes for axes in figure.axes if axes.images]
    return figure, panels


def test_shades_are_logarithmic_and_a_bar_says_what_they_are():
    figure, panels = drawn(5)
    assert len(panels) == 4
    norms = {(x.images[0].norm.vmin, x.images[0].norm.vmax) for x in panels}
    [(least, most)] = norms
    assert (least, most) == (pytest.approx(10**-DECADES), 1.0)
    half, tenth = (float(panels[0].images[0].norm(x)) for x in (0.5, 0.05))
    assert half - tenth == pytest.approx(1 / DECADES)
    [bar] = [axes for axes in figure.axes if not axes.images]
    assert bar.get_ylabel() == "weight"
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("to this token", "from this token")


@pytest.mark.parametrize("length", [20, 40])
def test_all_tokens_can_be_read(length):
    """Each label is within the picture, and none overlaps the next."""
    figure, panels = drawn(length, heads=2)
    for axes in panels:
        for labels, sides in ((axes.get_xticklabels(), ("x0", "x1")), (axes.get_yticklabels(), ("y0", "y1"))):
            boxes = [label.get_window_extent() for label in labels]
            assert len(boxes) == length
            assert all(figure.bbox.x0 <= x.x0 and figure.bbox.y0 <= x.y0 for x in boxes)
            assert all(x.x1 <= figure.bbox.x1 and x.y1 <= figure.bbox.y1 for x in boxes)
            middles = sorted((getattr(x, sides[0]) + getattr(x, sides[1])) / 2 for x in boxes)
            height = min(x.width if sides[0] == "x0" else x.height for x in boxes)
            assert min(b - a for a, b in zip(middles, middles[1:])) >= 0.8 * height


def test_a_long_text_has_numbers_on_its_axes():
    _, panels = drawn(60, heads=1)
    assert 2 < len(panels[0].get_xticklabels()) < 20
