"""Targets are judged from values, and what native kernels for attention have to reach from their costs."""

import math
from dataclasses import replace
from itertools import product

import pytest
from attention_cells import HEADS_FIRST, SIDE_BY_SIDE, Cell, Cost, Costs
from attention_report import table
from attention_targets import flops, targets

from scripts.common.targets import at_least, at_most, summary, target_table

MIB = 2**20


def test_one_value_on_the_wrong_side_misses_a_target_and_the_worst_is_told():
    target = at_least("fast", "causal", 5, {"t = 1": 5.0, "t = 2": 4.9, "t = 3": 9.0})
    assert target.met is False
    assert target.worst == ("t = 2", 4.9)
    assert target.missed == {"t = 2": 4.9}
    assert at_least("fast", "causal", 5, {"t = 1": 5.0}).met is True
    assert at_most("small", "causal", 1, {"t = 1": 1.0, "t = 2": 0.2}).met is True
    assert at_most("small", "causal", 1, {"t = 1": 1.1, "t = 2": 0.2}).worst == ("t = 1", 1.1)


def test_nothing_measured_is_neither_met_nor_missed_and_no_number_is_missed():
    nothing, nan = at_least("a", "x", 1, {}), at_least("b", "x", 1, {"here": math.nan})
    assert (nothing.met, nan.met) == (None, False)
    assert nothing.as_json()["worst"] is None
    assert summary([nothing, nan, at_most("c", "x", 1, {"": 0.5})]) == "1 met, 1 missed, 1 not measured"


def test_the_table_has_a_row_a_claim_a_column_a_case_and_every_miss():
    table = target_table(
        [
            at_least("five times", "causal", 5, {"t = 1": 6.25, "t = 2": 7.0}),
            at_least("five times", "full", 5, {"t = 1": 3.0, "t = 2": 2.0, "t = 3": 8.0}),
            at_least("a share", "causal", 0.7, {"t = 1": 0.71}, "%"),
        ]
    ).splitlines()
    assert table[0] == "| goal | causal | full |"
    assert table[2] == "| five times | 6.25× (t = 1) met | **2.00× (t = 2) missed** |"
    assert table[3] == "| a share | 71% (t = 1) met |  |"
    assert table[-1] == "* missed, full: five times: 3.00× (t = 1), 2.00× (t = 2) of 3 measured"


def test_flops_are_those_of_the_arithmetic():
    """4·d² + c·2d forward, 14·d² + 4c·2d with backward; a chunk is no longer than the sequence; full has no chunk."""
    d, heads = 64, 3
    assert flops(Cell(1024, d, True, False), heads, 32) == 1024 * heads * (4 * d * d + 32 * 2 * d)
    assert flops(Cell(1024, d, True, True), heads, 32) == 1024 * heads * (14 * d * d + 32 * 7 * d)
    assert flops(Cell(5, d, True, False), heads, 32) == 5 * heads * (4 * d * d + 5 * 2 * d)
    assert flops(Cell(1024, d, False, True), heads, 32) == 1024 * heads * 14 * d * d


LENGTHS = (1, 128, 256, 1024, 4096, 65536)


def made_costs(change=None):
    """Costs at which every target is met; `change` gives other numbers for some: {(method, dtype, cell): (ms, peak, extra)}."""
    ms = {"native": 1.0, "chunked": 6.0, "specialised": 5.0, "sdpa": 25.0}
    costs = Costs()
    kinds = product(LENGTHS, (32, 64, 128), (True, False), (True, False), (HEADS_FIRST, SIDE_BY_SIDE), (False, True))
    for cell in (Cell(*kind) for kind in kinds):
        # so fast that native is at 80 % of torch.mm
        mm = flops(cell, 8, 32) / 1e6 / 0.8 if cell.t >= 1024 else None
        for dtype, method in product(("float32", "bfloat16"), ms):
            time, peak, extra = (change or {}).get((method, dtype, cell), (ms[method], 10 * MIB, 2 * MIB))
            first = None if cell.layout == HEADS_FIRST else ms[method]
            costs.add(Cost(method, dtype, cell, time, time, time, 5, 1, peak, extra, mm, first))
    return costs


def missed(costs, threads=2):
    return {(t.claim, t.case): t.missed for t in targets(costs, 8, 32, threads) if t.met is False}


def test_where_all_is_well_every_target_is_met():
    found = targets(made_costs(), 8, 32, 2)
    assert all(t.met for t in found)
    assert {t.case for t in found} == {
        "float32, causal",
        "float32, full",
        "bfloat16, causal",
        "bfloat16, full",
        "float32, causal, cold",
        "float32, full, cold",
    }


CELL = Cell(4096, 64, True, True)


@pytest.mark.parametrize(
    ("who", "values", "words"),
    [
        (("chunked", "float32", CELL), (3.9, 0, 0), "forward + backward at least 4 times faster than chunked"),
        (("sdpa", "bfloat16", CELL), (19.0, 10 * MIB, 0), "at least 20 times faster than SDPA"),
        (("native", "float32", Cell(1024, 64, False, True)), (1.46, 0, 0), "at least 55% of torch.mm's rate"),
        (("native", "float32", Cell(65536, 128, True, False)), (1.0, 0, 2 * MIB + 1), "at most 1 MiB a thread"),
        (("native", "float32", CELL), (1.0, 10 * MIB + 1, 0), "never above SDPA's"),
        (("native", "bfloat16", CELL), (1.06, 0, 0), "bfloat16 not slower"),
        (("chunked", "float32", Cell(256, 64, True, False)), (0.94, 0, 0), "never slower than chunked"),
        (("specialised", "float32", Cell(1024, 128, True, True)), (2.9, 0, 0), "faster than specialised PyTorch"),
        (("native", "float32", Cell(4096, 64, True, True, SIDE_BY_SIDE)), (1.11, 0, 0), "at most 1.1 times as long"),
        (("sdpa", "float32", Cell(256, 64, True, False)), (0.99, 10 * MIB, 0), "faster than SDPA at every t"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_one_bad_cell_misses_one_target(who, values, words):
    [((claim, case), where)] = missed(made_costs({who: values})).items()
    assert words in claim
    assert case == f"{who[1]}, {who[2].kind}"
    assert list(where) == [str(who[2])]


def test_noise_is_not_a_miss():
    assert not missed(made_costs({("chunked", "float32", Cell(1, 64, True, False)): (0.96, 0, 0)}))
    assert not missed(made_costs({("native", "bfloat16", CELL): (1.05, 0, 0)}))


def test_memory_is_judged_at_the_longest():
    assert not missed(made_costs({("native", "float32", CELL): (1.0, 10 * MIB, 9 * MIB)}))


def test_a_share_is_of_the_rate_in_the_same_rounds():
    cost = made_costs().get("native", "float32", CELL)
    assert cost.share_of_matmul(flops(CELL, 8, 32)) == pytest.approx(0.8)
    assert cost.share_of_matmul(flops(CELL, 8, 0)) == pytest.approx(0.8 * 14 / 17.5)
    assert made_costs().get("native", "float32", Cell(1, 64, True, True)).share_of_matmul(1) is None


def test_a_row_has_times_ratios_shares_and_memory():
    cells = [CELL, Cell(1, 64, True, True)]
    costs = Costs(c for c in made_costs({("sdpa", "bfloat16", CELL): (123.4, 0, 0)}).by.values() if c.cell in cells)
    costs.add(replace(costs.get("chunked", "bfloat16", CELL), rounds=1))
    head, _, short, long = table(costs, "bfloat16", cells, 8, 32).splitlines()
    assert head == (
        "| pass | d | t | tarnn, native ms | chunked PyTorch ms | specialised PyTorch ms | SDPA (softmax) ms | "
        "chunked / native | specialised / native | sdpa / native | "
        "native: share of mm | without c | native float32 / bfloat16 | native extra MiB | chunked extra MiB | sdpa extra MiB |"
    )
    assert (
        short
        == "| forward + backward | 64 | 1 | 1 | 6 | 5 | 25 | 6.00 | 5.00 | 25.00 | – | – | 1.00 | 2.00 | 2.00 | 2.00 |"
    )
    assert long == (
        "| forward + backward | 64 | 4,096 | 1 | 6* | 5 | 123 | 6.00 | 5.00 | 123.40 | 80% | 64% | 1.00 | 2.00 | 2.00 | 0.00 |"
    )


def test_what_was_not_measured_is_not_judged():
    costs = Costs(c for c in made_costs().by.values() if c.method != "native")
    assert all(t.met is None for t in targets(costs, 8, 32, 2))
