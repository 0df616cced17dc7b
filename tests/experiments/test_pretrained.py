"""Pretrained models with hybrid attention: the rows, and that a second run goes on."""

import json

ROWS = {"softmax", "far off", "equal bytes", "features, seed 0"}


def test_rows_controls_and_going_on(script, data, data_of, tmp_path):
    options = ("pretrained", "--quick", "--parts", "stories", "--data", data("stories260k").parent)
    code, out, _ = script(*options)
    assert code == 0
    found = data_of("pretrained")["results"]
    rows = {name.removeprefix("stories, ") for name in found if name.startswith("stories, ")}
    assert rows == {*ROWS, "after stage 1"}
    recall = {name.removeprefix("stories recall, ") for name in found if name.startswith("stories recall")}
    assert recall == {*ROWS, "features and slots"}
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
