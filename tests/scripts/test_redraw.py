"""Pictures come from saved results alone: each can be drawn anew."""

import json

import pytest

from scripts import redraw


@pytest.mark.parametrize("path", redraw.drawn(), ids=lambda path: path.stem)
def test_a_picture_is_drawn_from_its_results(path, pictures):
    picture = path.with_suffix(".png").name
    before = path.read_bytes()
    kept = path.with_suffix(".png").read_bytes()
    redraw.redraw(path)
    assert path.with_suffix(".png").read_bytes() == kept  # the fixture draws nothing
    assert path.read_bytes() == before
    panels = [axes for axes in pictures[picture].axes if axes.lines or axes.collections]
    assert panels
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)


def test_the_script_is_that_of_the_first_command():
    data = json.loads('{"command": ["python benchmarks/decode.py --threads 2", "python x.py"]}')
    assert redraw.script_of(data) == "decode"
    assert redraw.script_of({"command": "python benchmarks/step.py"}) == "step"
