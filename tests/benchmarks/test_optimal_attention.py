"""benchmarks/optimal_attention.py with a tiny model: what is measured, what is left out, and what it refuses."""

import json

import optimal_attention
import pytest
from clock import Effort, Timing

TINY = ["--quick", "--lengths", "8", "16", "--hidden-size", "32", "--features", "4"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(optimal_attention, "Effort", lambda **_: Effort(0, rounds=(3, 3)))


def test_three_models_are_measured_against_length(script, tmp_path):
    code, out, _ = script("optimal_attention", *TINY)
    assert code == 0
    data = json.loads((tmp_path / "optimal_attention.json").read_text())
    assert list(data["results"]) == ["8", "16"]
    assert all(set(at) == {"performer", "softmax", "none"} for at in data["results"].values())
    assert (data["layers"], data["hidden_size"], data["features"], data["left_out"]) == (1, 32, 4, [])
    text = (tmp_path / "optimal_attention.md").read_text()
    assert "| performer / none | softmax / none | softmax / performer |" in text
    at = data["results"]["16"]
    assert f"| {at['performer']['ms'] / at['none']['ms']:.2f} |" in text
    assert (tmp_path / "optimal_attention.png").stat().st_size > 10_000
    assert out.splitlines()[-1] == str(tmp_path / "optimal_attention.png")


def test_the_models_differ_in_their_attention_alone():
    options = type("Options", (), {"hidden_size": 32, "features": 4, "layers": 2})
    models = {name: optimal_attention.make_model(name, options) for name in optimal_attention.RIVALS}
    names = {name: {n for n, _ in model.named_parameters()} for name, model in models.items()}
    assert names["performer"] == names["softmax"] > names["none"]
    assert all("q_proj" in n or "k_proj" in n for n in names["softmax"] - names["none"])
    maps = [m for m in models["performer"].modules() if type(m).__name__ == "PositiveRandomFeatures"]
    assert [m.num_features(4) for m in maps] == [4, 4]


def test_what_would_take_too_long_is_left_out_and_listed(script, tmp_path):
    assert script("optimal_attention", *TINY, "--rivals", "softmax", "none", "--longest-call", "1e-9")[0] == 0
    data = json.loads((tmp_path / "optimal_attention.json").read_text())
    assert {t: set(at) for t, at in data["results"].items()} == {"8": {"softmax", "none"}, "16": set()}
    assert [line.partition(":")[0] for line in data["left_out"]] == ["softmax, t = 16", "none, t = 16"]
    assert "* softmax, t = 16: a step would take about" in (tmp_path / "optimal_attention.md").read_text()


def test_softmax_grows_with_the_square_of_length():
    found = {8: {name: Timing(1000, 1000, 1000, 3, 1, None) for name in optimal_attention.RIVALS}}
    assert optimal_attention.too_long("softmax", 16, found, 3.9) == "a step would take about 4 s, by t = 8"
    assert optimal_attention.too_long("softmax", 16, found, 4.0) == ""
    assert optimal_attention.too_long("performer", 16, found, 2.0) == ""
    assert "about 2 s" in optimal_attention.too_long("performer", 16, found, 1.9)
    assert optimal_attention.too_long("none", 16, {8: {}}, 0.0) == ""  # nothing known


def test_nothing_is_measured_where_the_gradients_are_wrong(script, tmp_path, wrong_gradients):
    code, _, err = script("optimal_attention", *TINY)
    assert code == 1
    assert "off plain PyTorch by 1.0e-03" in err
    assert not list(tmp_path.iterdir())
