"""Pictures for pages: readable on light and dark pages, with few lines, whose names are off the curves."""

import pytest
from PIL import Image

from scripts.common import plots

PAGES = {"light": "#ffffff", "dark": "#0d1117"}


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(a * x for a, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", PAGES)
def test_lines_and_letters_stand_out_from_the_page(page):
    colors = (plots.BLUE, plots.SKY, plots.GREEN, plots.ORANGE, plots.RED, plots.PINK, plots.GREY)
    assert [x for x in colors if contrast(x, PAGES[page]) < 3] == []
    assert contrast(plots.INK, PAGES[page]) > 4


def drawing(number):
    figure, axes = plots.panels(2, "title")
    for panel in axes:
        for i in range(number):
            plots.line(panel, [(1, 1 + i), (2, 2 + i)], plots.BLUE, f"line {i}")
        plots.label(panel, "x", "y")
    return figure


def test_names_stand_once_and_off_the_curves(tmp_path):
    plots.save(figure := drawing(3), tmp_path / "a.png")
    [legend] = figure.legends
    assert [x.get_text() for x in legend.get_texts()] == ["line 0", "line 1", "line 2"]
    below = legend.get_window_extent().y1
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert axes.get_tightbbox().y0 > below
    picture = Image.open(tmp_path / "a.png").convert("RGBA")
    assert picture.getpixel((0, 0))[3] == 0  # no ground
    assert (tmp_path / "a.png").stat().st_size < 30_000


def test_more_lines_than_can_be_told_apart_are_refused(tmp_path):
    plots.save(drawing(plots.MOST_LINES), tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"b\.png has 8 lines, at most 7 are readable: line 0, line 1"):
        plots.save(drawing(plots.MOST_LINES + 1), tmp_path / "b.png")
