"""The README's measured times are those of the results beside it: a table that fell behind is a wrong claim."""

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "readme_figures.py"))
README = SCRIPT["README"].read_text(encoding="utf-8")


def test_what_the_readme_says_was_measured():
    assert SCRIPT["with_figures"](README) == README, "write it anew: python scripts/readme_figures.py"


@pytest.mark.parametrize(
    "stale",
    ["model takes ", "cache takes ", "float32 | ", "int4 | ", "128 tokens | ", "(Qwen3.5) | ", "attention.md), with "],
)
def test_a_figure_that_fell_behind_is_found(stale):
    """In each table and sentence."""
    before, after = README.split(stale, 1)
    figure = after.split()[0]
    assert figure.replace(".", "").isdigit()
    text = f"{before}{stale}{after.replace(figure, '77.77', 1)}"
    assert text != README
    assert SCRIPT["with_figures"](text) == README
