"""benchmarks/favor.py from end to end, with tiny sizes; what its methods compute and keep; its targets."""

import json

import attention_cells
import favor
import pytest
from attention_cells import Cell, Cost, Costs
from favor_report import DTYPE, LABELS, flops, named, table, targets
from support.scripts import lines_of

from scripts.common.clock import Effort
from tarnn import PositiveRandomFeatures, linear_attention
from tarnn.kernels.cpu import library

TINY = ["--quick", "--lengths", "40", "--features", "6", "--head-dim", "8", "--heads", "2", "--seconds", "0.01"]
CELL = Cell(50, 8, True, True)


def test_a_run_leaves_figures_tables_and_a_picture(script, folder, pictures):
    code, out, _ = script("favor", *TINY)
    assert code == 0
    data = json.loads((folder / "favor.json").read_text())
    costs = Costs.from_json(data)
    kinds = ["fused", "stored", *(["ready"] if library.available() else [])]
    assert set(costs.methods) == {"sdpa", *(named(kind, 6) for kind in kinds)}
    assert len(costs.by) == (1 + len(kinds)) * 2 * 2  # causal and full, forward and both
    assert {t["case"] for t in data["targets"]} == {"m = 6, causal", "m = 6, full"}
    text = (folder / "favor.md").read_text()
    assert "## m = 6, not causal" in text
    assert "| forward + backward | 40 |" in text
    forward, both, memory = map(lines_of, pictures["favor.png"].axes)
    for lines, backward in ((forward, False), (both, True)):
        at = Cell(40, 8, True, backward)
        assert lines == {LABELS[name.split(",")[0]]: ([40], [costs.get(name, DTYPE, at).ms]) for name in costs.methods}
    assert set(memory) <= set(both)
    assert out.splitlines()[-2] == str(folder / "favor.png")


def test_an_interruption_keeps_what_there_is(script, folder, monkeypatch):
    measured = []

    def interrupted(cell, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(cell)
        return whole(cell, *rest)

    whole = attention_cells.measure_cell
    monkeypatch.setattr(attention_cells, "measure_cell", interrupted)
    monkeypatch.setattr(favor, "wrong", lambda *rest, **phi: "")  # known to be right: no need to look twice
    assert script("favor", *TINY)[0] == 130
    assert Costs.from_json(json.loads((folder / "favor.json").read_text())).cells == measured
    assert (folder / "favor.md").exists()


def test_nothing_is_measured_of_what_is_wrong(script, folder, monkeypatch):
    monkeypatch.setattr(favor, "linear_attention", lambda *args, **options: 1.0001 * linear_attention(*args, **options))
    code, _, err = script("favor", *TINY)
    assert code == 1
    assert "the check is red: fused, m = 6, t = 97, d = 8, causal, float64: o is 1.0e-04 off the definition" in err
    assert not folder.exists()


def test_features_are_stored_by_plain_pytorch_and_ready_before_the_clock(monkeypatch):
    """Nobody computes features in the clock for `ready`; `stored` does so twice, and no native kernel serves it."""
    if not library.available():
        pytest.skip("no native kernels here")
    phi, seen = PositiveRandomFeatures(8, 16, seed=0), {"ready": [], "stored": []}
    methods = {r.name.split(",")[0]: r for r in favor.methods_of(phi)}
    q, k, v, grad = attention_cells.draw_inputs(CELL.t, CELL.d, ["float32"], 1, 2, "cpu")["float32"]
    exponents = phi.exponents
    for kind, calls in seen.items():
        given = methods[kind].given(q, k, v)
        f = attention_cells.call(methods[kind], given, grad, CELL)
        monkeypatch.setattr(phi, "exponents", lambda x, calls=calls: calls.append(library.available()) or exponents(x))
        with methods[kind].surroundings():
            gradients = f()
        monkeypatch.setattr(phi, "exponents", exponents)
        width = 16 if kind == "ready" else 8
        assert [x.shape[-1] for x in gradients] == [width, width, 8]
    assert seen == {"ready": [], "stored": [False, False]}


def test_results_are_not_extra_memory(monkeypatch):
    """What is given with a gradient has one among the results: for `ready`, of the width of the features."""
    if not library.available():
        pytest.skip("no native kernels here")
    entrants = [(r, "float32") for r in favor.methods_of(PositiveRandomFeatures(8, 16, seed=0))]
    inputs = attention_cells.draw_inputs(CELL.t, CELL.d, ["float32"], 1, 2, "cpu")
    monkeypatch.setattr("scripts.common.clock.metered", lambda f, device: (0.001, 10**6))
    costs = attention_cells.measure_cell(CELL, inputs, entrants, Effort(0, rounds=(1, 1)), "cpu")
    extra = {c.method.split(",")[0]: c.extra_bytes for c in costs}
    position = 2 * CELL.t * 4  # bytes of one number a head and position
    assert extra["fused"] == extra["stored"] == 10**6 - position * (8 + 8 + 8 + 8)
    assert extra["ready"] == 10**6 - position * (16 + 16 + 8 + 8)


def made_costs(ms, extra):
    costs = Costs()
    for t in (1024, 4096):
        for causal in (True, False):
            for backward in (True, False):
                for kind, time in ms.items():
                    cell = Cell(t, 64, causal, backward)
                    x = Cost(named(kind, 64), "float32", cell, time, time, time, 5, 1, 0, extra[kind], None)
                    costs.add(x)
    return costs


@pytest.mark.parametrize(
    ("ms", "extra", "missed"),
    [
        ((1.0, 5.0, 0.5), (10, 100), None),
        ((1.0, 4.9, 0.5), (10, 100), "at least 5 times faster than with stored features"),
        ((1.0, 5.0, 0.5), (11, 100), "at most a tenth of its extra memory"),
        ((1.0, 5.0, 0.49), (10, 100), "at most 2 times as long as with features ready made"),
    ],
)
def test_targets(ms, extra, missed):
    costs = made_costs(
        dict(zip(("fused", "stored", "ready"), ms)), {"ready": 0, **dict(zip(("fused", "stored"), extra))}
    )
    found = targets(costs, [64])
    assert len(found) == 12
    assert all(len(t.values) == 2 for t in found)
    assert {t.claim.partition(": ")[2] for t in found if not t.met} == ({missed} if missed else set())
    assert all(t.met is None for t in targets(costs, [256]))


def test_flops_are_those_of_the_arithmetic():
    """Projections of q and k, and what linear attention does with features of that width; a full call has no chunk."""
    d, m, heads = 64, 256, 3
    assert flops(Cell(100, d, False, False), m, heads, 32) == 100 * heads * (4 * d * m + 4 * m * d)
    assert flops(Cell(100, d, False, True), m, heads, 32) == 100 * heads * (12 * d * m + 12 * m * d)
    assert flops(Cell(100, d, True, False), m, heads, 32) == 100 * heads * (8 * d * m + 32 * (m + d))
    assert flops(Cell(7, d, True, True), m, heads, 32) == 7 * heads * (26 * d * m + 7 * (4 * m + 3 * d))


def test_a_row_has_times_ratios_shares_and_memory():
    cell, costs = Cell(1024, 64, False, False), Costs()
    mm = flops(cell, 64, 8, 32) / 1e6 / 0.8  # so fast that one millisecond is 80 % of torch.mm
    for name, ms, extra in (("fused, m = 64", 1.0, 2**20), ("stored, m = 64", 5.0, 2**24), ("sdpa", 123.4, 0)):
        costs.add(Cost(name, "float32", cell, ms, ms, ms, 1 if name == "sdpa" else 5, 1, 0, extra, mm))
    assert table(costs, 64, [cell], 8, 32).splitlines()[-1] == (
        "| forward | 1,024 | 1 | 5 | – | 123* | 5.00 | 6.25 | – | 123.40 | 80% | 16% | 1.0 | 16.0 | – | 0.0 | 6.2% |"
    )
