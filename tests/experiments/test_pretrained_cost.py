"""What a converted model costs: the script runs, finds crossovers, and goes on after an interruption."""

import json

import pretrained_cost
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers has to say of random configs


def row(method, length, cost):
    return {"method": method, "length": length, "prefill_s": cost, "token_ms": cost, "bytes": cost}


def test_the_crossover_is_where_hybrid_stays_cheaper():
    costs = {"softmax": [1, 3, 2, 5, 9], "hybrid": [2, 2, 4, 4, 4]}
    found = {f"{m}, {n}": row(m, n, x) for m, xs in costs.items() for n, x in enumerate(xs)}
    assert pretrained_cost.crossovers(found) == dict.fromkeys(pretrained_cost.WHAT, 3)
    assert pretrained_cost.crossovers({})["bytes"] is None


def test_it_runs_and_goes_on(script, folder):
    assert script("pretrained_cost", "--quick").code == 0
    file = folder / "pretrained_cost.json"
    found = json.loads(file.read_text())["results"]
    assert len(found) == 4
    assert found["hybrid, 64"]["bytes"] == found["hybrid, 128"]["bytes"]
    script("pretrained_cost", "--quick", "--resume")
    assert json.loads(file.read_text())["results"] == found
