"""Goals are judged from values, and no figure is not a missed one."""

import math
from dataclasses import replace

import pytest
import step
from toolkit.attention_cells import Cell, Cost, Costs
from toolkit.attention_targets import targets

from scripts.common.targets import at_least, at_most, summary, target_table


def test_one_value_on_the_wrong_side_misses_a_goal_and_the_worst_is_named():
    target = at_least("fast", "causal", 5, {"t = 1": 5.0, "t = 2": 4.9, "t = 3": 9.0})
    assert (target.met, target.worst, target.missed) == (False, ("t = 2", 4.9), {"t = 2": 4.9})
    assert at_least("fast", "causal", 5, {"t = 1": 5.0}).met is True
    assert at_most("small", "causal", 1, {"t = 1": 1.1, "t = 2": 0.2}).worst == ("t = 1", 1.1)
    nothing, nan = at_least("a", "x", 1, {}), at_least("b", "x", 1, {"here": math.nan})
    assert (nothing.met, nan.met) == (None, False)
    assert summary([nothing, nan, at_most("c", "x", 1, {"": 0.5})]) == "1 met, 1 missed, 1 not measured"
    table = target_table([at_least("five times", "causal", 5, {"t = 1": 3.0, "t = 2": 8.0})]).splitlines()
    assert table[2] == "| five times | **3.00× (t = 1) missed** |"


def test_goals_of_attention_are_judged_from_its_costs():
    cell = Cell(4096, 64, True, True)
    rows = {"native": 1.0, "chunked": 3.9, "sdpa": 25.0}
    costs = Costs(Cost(name, "float32", cell, ms, ms, ms, 5, 1, 0, 0, None) for name, ms in rows.items())
    met = {t.claim: t.met for t in targets(costs, 8, 2) if t.case == "float32, causal"}
    four_times = next(claim for claim in met if "forward + backward at least 4 times faster than chunked" in claim)
    assert met[four_times] is False
    assert True in met.values()
    costs.add(replace(costs.get("chunked", "float32", cell), ms=4.0))
    assert {t.claim: t.met for t in targets(costs, 8, 2) if t.case == "float32, causal"}[four_times] is True


@pytest.mark.parametrize(("ms", "met"), [(0.0180, True), (0.0181, False)])
def test_a_step_is_held_against_an_empty_call_and_its_state_copied(monkeypatch, ms, met):
    monkeypatch.setattr(step.library, "available", lambda: True)

    class Milliseconds(float):
        ms = property(float)

    one = {"tarnn.step": ms, "tarnn.step, batch 0": 0.008, "copy_": 0.005, "copy_, empty": 0.001}
    many = {"tarnn.step": 10.0, "copy_": 7.0 if met else 6.9, "copy_, empty": 0.001}
    found = {n: {k: Milliseconds(v) for k, v in x.items()} for n, x in {1: one, 128: many}.items()}
    assert [t.met for t in step.targets(found) if t.case == "tarnn.step"] == [met, met]
