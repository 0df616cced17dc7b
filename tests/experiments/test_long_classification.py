"""Long sequences to classify: ListOps' values, and a run of the whole script."""

import random
import re

import long_classification
import pytest


def value_of(tokens):
    """An expression's value, by another way than the generator's: with Python's own syntax."""
    functions = {"[MAX": "max", "[MIN": "min", "[MED": "median", "[SM": "modulo"}
    text = "".join(f"{functions[x]}([" if x in functions else "])," if x == "]" else f"{x}," for x in tokens)
    names = {
        "max": max,
        "min": min,
        "modulo": lambda x: sum(x) % 10,
        "median": lambda x: (sorted(x)[(len(x) - 1) // 2] + sorted(x)[len(x) // 2]) // 2,
    }
    return eval(text, {"__builtins__": {}}, names)[0]


def test_values_of_expressions():
    source, lengths = random.Random(1), set()
    for _ in range(200):
        tokens, value = long_classification.expression(source, 10_000)
        assert value_of(tokens) == value
        assert 0 <= value <= 9
        lengths.add(len(tokens))
    assert len(lengths) > 20


@pytest.fixture
def reviews(tmp_path):
    for name in ("train", "test"):
        rows = [f"{i % 2}\t{i}\tx\t{'a good one' if i % 2 else 'a bad one'}\n" for i in range(16)]
        (tmp_path / f"{name}.tsv").write_text("".join(rows))
        (tmp_path / f"{name}.tsv").rename(tmp_path / f"{name}.tsv.gz")  # read by what it holds, not by its name
    return tmp_path


def test_a_quick_run_goes_on(reviews, script, data_of, tmp_path):
    options = ("long_classification", "--quick", "--data", reviews, "--runs", tmp_path / "runs")
    first = script(*options)
    found = data_of("long_classification")["results"]
    assert first.code == 0, first.err
    assert set(found["accuracy"]) == {"text", "listops"}
    assert set(found["speed"]) == {f"{m} {n}" for m in long_classification.ATTENTION for n in (64, 128)}
    assert len(re.findall(r"step': \d", first.out)) == 24
    second = script(*options)
    assert not re.findall(r"step': \d", second.out)
    assert data_of("long_classification")["results"]["accuracy"] == found["accuracy"]
