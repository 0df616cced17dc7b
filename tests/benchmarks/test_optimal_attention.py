"""benchmarks/optimal_attention.py with a tiny model: what is measured, what is left out, and what it refuses."""

import json

import model_steps
import optimal_attention
import pytest
from support.scripts import lines_of

from scripts.common.clock import Effort, Timing

TINY = ["--quick", "--lengths", "8", "16", "--hidden-size", "32", "--features", "4"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(model_steps, "EFFORT", Effort(0, rounds=(3, 3)))


def test_three_models_are_measured_against_length(script, folder, pictures):
    code, out, _ = script("optimal_attention", *TINY)
    assert code == 0
    data = json.loads((folder / "optimal_attention.json").read_text())
    assert list(data["results"]) == ["8", "16"]
    assert all(set(at) == {"performer", "softmax", "none"} for at in data["results"].values())
    settings = data["settings"]
    assert (settings["layers"], settings["hidden_size"], settings["features"], data["left_out"]) == (1, 32, 4, [])
    text = (folder / "optimal_attention.md").read_text()
    assert "| performer / none | softmax / none | softmax / performer |" in text
    at = data["results"]["16"]
    assert f"| {at['performer']['ms'] / at['none']['ms']:.2f} |" in text
    times, sizes = pictures["optimal_attention.png"].axes
    expected = {m: ([8, 16], [at[m]["ms"] for at in data["results"].values()]) for m in optimal_attention.METHODS}
    assert lines_of(times) == expected
    assert (times.get_xscale(), sizes.get_yscale(), sizes.get_ylabel()) == ("log", "log", "peak MiB")
    assert out.splitlines()[-2] == str(folder / "optimal_attention.png")


def test_the_models_differ_in_their_attention_alone():
    options = type("Options", (), {"hidden_size": 32, "features": 4, "layers": 2})
    models = {name: optimal_attention.make_model(name, options) for name in optimal_attention.METHODS}
    names = {name: {n for n, _ in model.named_parameters()} for name, model in models.items()}
    assert names["performer"] == names["softmax"] > names["none"]
    assert all("q_proj" in n or "k_proj" in n for n in names["softmax"] - names["none"])
    maps = [m for m in models["performer"].modules() if type(m).__name__ == "PositiveRandomFeatures"]
    assert [m.num_features(4) for m in maps] == [4, 4]


def test_what_would_take_too_long_is_left_out_and_listed(script, folder):
    assert script("optimal_attention", *TINY, "--methods", "softmax", "none", "--longest-call", "1e-9")[0] == 0
    data = json.loads((folder / "optimal_attention.json").read_text())
    assert {t: set(at) for t, at in data["results"].items()} == {"8": {"softmax", "none"}, "16": set()}
    assert [line.partition(":")[0] for line in data["left_out"]] == ["softmax, t = 16", "none, t = 16"]
    assert "* softmax, t = 16: a step would take about" in (folder / "optimal_attention.md").read_text()


def test_softmax_grows_with_the_square_of_length():
    found = {8: {name: Timing(1000, 1000, 1000, 3, 1, None) for name in optimal_attention.METHODS}}
    assert optimal_attention.too_long("softmax", 16, found, 3.9) == "a step would take about 4 s, by t = 8"
    assert optimal_attention.too_long("softmax", 16, found, 4.0) == ""
    assert optimal_attention.too_long("performer", 16, found, 2.0) == ""
    assert "about 2 s" in optimal_attention.too_long("performer", 16, found, 1.9)
    assert optimal_attention.too_long("none", 16, {8: {}}, 0.0) == ""  # nothing known


def test_nothing_is_measured_where_the_gradients_are_wrong(script, folder, wrong_gradients):
    code, _, err = script("optimal_attention", *TINY)
    assert code == 1
    assert "off plain PyTorch by 1.0e-03" in err
    assert not folder.exists()
