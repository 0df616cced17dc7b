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
    ["| 1,024 | 1 |", "| 4,096 | 32 |", "| 128 |", "(Qwen3.5) |", "call per token: ", "shape takes ", "memory: "],
)
def test_a_figure_that_fell_behind_is_found(stale):
    """In each table and sentence."""
    before, after = README.split(stale, 1)
    figure = after.split()[0]
    assert figure.replace(".", "").isdigit()
    text = f"{before}{stale}{after.replace(figure, '77.77', 1)}"
    assert text != README
    assert SCRIPT["with_figures"](text) == README


def test_pytorch_is_the_faster_of_two_ways():
    times = {
        (c["t"], c["backward"], c["method"]): c["ms"]
        for c in SCRIPT["results"]("attention")
        if (c["d"], c["dtype"], c["causal"], c["layout"], c["cold"]) == (64, "float32", True, "heads-first", False)
    }
    for t, _, forward, _, _, both, _ in SCRIPT["attention_rows"]():
        for backward, shown in ((False, forward), (True, both)):
            ways = [times[int(t.replace(",", "")), backward, way] for way in ("chunked", "specialised")]
            assert shown == f"{min(ways):,.2f}"
