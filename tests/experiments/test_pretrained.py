"""Pretrained models with hybrid attention: the rows, and that a second run goes on."""

import json

import pytest
import torch

ROWS = {"softmax", "far off", "equal bytes", "features, seed 0"}


def test_rows_controls_and_going_on(script, data, data_of, tmp_path):
    options = ("pretrained", "--quick", "--parts", "stories", "--data", data("stories260k").parent)
    code, out, _ = script(*options)
    assert code == 0
    found = data_of("pretrained")["results"]
    rows = {name.removeprefix("stories, ") for name in found if name.startswith("stories, ")}
    assert rows == {*ROWS, "after stage 1"}
    assert found["stories, softmax"]["more"] == 0
    assert len(found["stories, far off"]["by_eighths"]) == 8
    assert "share of the gap closed" in out
    assert "left out" not in out
    path = tmp_path / "results" / "pretrained.json"
    facts = json.loads(path.read_text())
    facts["results"]["stories, softmax"]["nats"] = -1.0  # kept as it is
    path.write_text(json.dumps(facts))
    assert script(*options, "--resume")[0] == 0
    assert data_of("pretrained")["results"]["stories, softmax"]["nats"] == -1.0


def test_recall_over_distances_with_slots_and_controls(script, data, data_of, tmp_path):
    import recall_model

    recall_model.model_of(64, 1, 64).save_pretrained(tmp_path / "model")
    options = (
        "--parts",
        "recall",
        "--recall",
        tmp_path / "model",
        "--stage1-steps",
        0,
        "--data",
        data("stories260k").parent,
    )
    code, out, _ = script("pretrained", "--quick", *options)
    assert code == 0
    found = {name.removeprefix("recall, "): x["right"] for name, x in data_of("pretrained")["results"].items()}
    assert set(found) == {*ROWS, "slots alone", "equal bytes of both", "features and slots, seed 0"}
    assert len(found["softmax"]) == 10
    assert "pair, 12 w" in out


@pytest.mark.parametrize("kind", ["pair", "needle"])
def test_what_is_asked_for_stood_there_before(script, kind):
    import recall_model

    rows = recall_model.question(kind, 5, 64, 20)
    for ids, asked in zip(*rows):
        for place in asked.nonzero().flatten().tolist():
            assert ids[place] == ids[place - 20]
            assert ids[place - 1] == ids[place - 21]
    rows = recall_model.batch(5, 64, torch.Generator().manual_seed(0))
    for ids, asked in zip(*rows):
        for place in asked.nonzero().flatten().tolist():
            before = [i for i in range(1, place) if ids[i - 1] == ids[place - 1]]
            assert ids[place] in ids[before]


def test_beyond_its_calibration_features_are_window_and_sinks(script, data, data_of):
    code, out, _ = script("beyond_calibration", "--quick", "--data", data("stories260k").parent)
    assert code == 0
    found = data_of("beyond_calibration")["results"]
    ended, endless = (found[f"64, features in all heads{x}"] for x in ("", ", without an end"))
    assert ended["0× … 1×"] == endless["0× … 1×"]
    assert ended["1× … 2×"] != endless["1× … 2×"]
    assert "without an end" in out
