"""The table of rivals: it keeps what was measured, trains in turns, and says who learned nothing."""

import json

import pytest
from measures.attentions import MOST, ROWS
from measures.rival_page import learned_table

from scripts.common.loop import in_turns

ROWS_TRIED = ["softmax", "window + sinks", "Transformer-XL", "Linformer"]
TASKS_TRIED = ["copying", "reviews", "pixels"]
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs


@pytest.fixture
def options(reviews, mnist, tmp_path):
    return [
        "--quick",
        "--rows",
        *ROWS_TRIED,
        "--tasks",
        *TASKS_TRIED,
        "--data",
        reviews,
        "--mnist",
        mnist,
        "--runs",
        tmp_path / "runs",
    ]


def test_a_quick_run_has_every_part_and_goes_on(script, data_of, folder, pictures, options, tmp_path):
    assert script("rival_table", *options).code == 0
    results = data_of("rival_table")["results"]
    assert {side: sorted(rows) for side, rows in results["cost"].items() if rows} == {
        "back": sorted(ROWS_TRIED),
        "both": sorted(ROWS_TRIED),
    }
    assert set(results["cost"]["both"]["Linformer"]) == {"64", "128"}
    assert not results["cost"]["back"]["Linformer"]
    assert not results["cost"]["both"]["Transformer-XL"]
    assert set(results["quality"]["pixels"]["short"]) == set(ROWS_TRIED) - {"Linformer"}
    assert set(results["quality"]["reviews"]["short"]) == set(ROWS_TRIED)
    assert set(results["quality"]["copying"]["long"]) == {"softmax", "window + sinks"}
    assert set(results["quality"]["reviews"]["long"]["softmax"]) == {"0", "1"}
    assert "\n| Linformer | – | " in (folder / "rival_table.md").read_text()
    assert len(pictures["rival_table.png"].axes) == 3
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}
    assert len(before) == 2 * 3 + 4 + 3 * 2 * 2
    assert script("rival_table", *options, "--parts", "cost", "short").code == 0
    assert before == {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*.pt")}
    assert json.loads((tmp_path / "runs/cost.json").read_text()) == results["cost"]


def test_runs_go_on_in_turns():
    runs = {"a": iter([1, 2, 3]), "b": iter([4]), "c": iter([5, 6])}
    assert list(in_turns(runs)) == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("c", 6), ("a", 3)]


def test_who_learns_nothing_is_told_so():
    def runs(*scores):
        return {str(i): {"curve": [{"step": 1, "score": x}]} for i, x in enumerate(scores)}

    accuracy = {"unit": "%", "guess": 50.0, "margin": 2.0, "more_is_better": True}
    bits = {"unit": "bits", "guess": 2.0, "margin": 0.1, "more_is_better": False}
    table = learned_table(
        "long",
        {
            "reviews": {**accuracy, "long": {"softmax": runs(60, 62), "linear": runs(51.9)}},
            "pixels": {**bits, "long": {"softmax": runs(1.5), "linear": runs(1.95)}},
            "copying": accuracy,
        },
    )
    assert table.splitlines()[2:] == [
        "| guessing | 50.0 | 2.000 |",
        "| softmax | 61.0 (60.0 to 62.0) | 1.500 |",
        "| linear | 51.9, nothing learned | 1.950, nothing learned |",
    ]


def test_the_rows_that_matter_most_are_rows():
    assert set(MOST) < set(ROWS)
