"""benchmarks/attention.py from end to end, with tiny sizes; who takes part, what is left out, what an interruption leaves."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import attention_cells
import baselines
import torch
from attention_cells import SIDE_BY_SIDE, Cell, Cost, Costs
from attention_report import NAMES
from baselines import Method
from support.scripts import lines_of
from torch.nn.functional import elu

TINY = ["--lengths", "1", "40", "--head-dims", "16", "--heads", "2", "--seconds", "0.01", "--passes", "both"]


def one_head(*lengths, kind):
    return ["--lengths", *lengths, "--head-dims", "16", "--heads", "1", "--dtypes", "float32", "--kinds", kind]


def results(folder):
    data = json.loads((folder / "attention.json").read_text())
    return data, Costs.from_json(data)


def test_a_run_leaves_figures_tables_and_a_picture(script, folder, pictures):
    code, out, _ = script("attention", *TINY)
    assert code == 0
    data, costs = results(folder)
    methods = {"chunked", "specialised", "sdpa"} | ({"native"} if "native" not in data["absent"] else set())
    assert set(costs.methods) == methods
    plain = [cell for _, _, cell in costs.by if cell.plain]
    assert "specialised in bfloat16" in data["absent"]  # in 16 bits throughout, it is too far off
    assert len(plain) == (len(methods) * 2 - 1) * 2 * 2  # dtypes, lengths, causal and full
    spread = [who for *who, cell in costs.by if cell.layout == SIDE_BY_SIDE]
    assert len(spread) == len({"native", "specialised"} & methods) * 2 * 2  # in float32
    # of ours, the other layout ran in the same rounds
    twins = {who for (who, _, cell), cost in costs.by.items() if cost.heads_first_ms}
    assert twins == {"native"} & methods
    assert not any(cell.cold for _, _, cell in costs.by)  # too short for it
    assert data["command"] == f"python benchmarks/attention.py --threads 1 {' '.join(TINY)}"
    assert data["threads"] == 1
    assert {t["met"] for t in data["targets"]} <= {True, False, None}
    for cost in costs.by.values():
        assert cost.ms_min <= cost.ms <= cost.ms_max
        assert cost.mm_gflops is None
    text = (folder / "attention.md").read_text()
    assert "## bfloat16, not causal" in text
    assert "| forward + backward | 16 | 40 |" in text
    assert "fast-transformers: not installed" in text
    forward, both, memory = pictures["attention.png"].axes
    assert not forward.lines  # only --passes both
    cells = [Cell(t, 16, True, True) for t in (1, 40)]
    expected = {NAMES[m]: ([1, 40], [costs.get(m, "float32", c).ms for c in cells]) for m in methods}
    found = lines_of(both)
    assert {name: found[name] for name in expected} == expected
    assert len(found) == len(methods) + len(both.lines) // 2  # bfloat16 is dashed, and not in the legend
    assert (memory.get_ylabel(), memory.get_xscale()) == ("MiB beyond inputs and outputs", "log")
    assert out.splitlines()[-2] == str(folder / "attention.png")


def test_from_1024_on_torch_mm_runs_in_the_same_rounds(script, folder):
    options = one_head("1024", kind="causal")
    assert script("attention", *options, "--seconds", "0.01", "--methods", "chunked")[0] == 0
    data, costs = results(folder)
    assert data["matmul_gflops"]["cells"] == 2
    rates = [c.mm_gflops for c in costs.by.values()]
    assert data["matmul_gflops"]["least"] == min(rates) > 1


def test_an_interrupted_run_keeps_what_it_has_and_is_taken_up_again(script, folder, monkeypatch):
    measured = []

    def interrupted(cell, *rest):
        if len(measured) == 2:
            assert results(folder)[1].cells == sorted(measured)  # kept as it comes: the end may be sudden
            raise KeyboardInterrupt
        measured.append(cell)
        return whole(cell, *rest)

    whole = attention_cells.measure_cell
    monkeypatch.setattr(attention_cells, "measure_cell", interrupted)
    code, _, err = script("attention", *TINY)
    assert code == 130
    assert "--resume goes on" in err
    _, costs = results(folder)
    assert costs.cells == sorted(measured)
    assert (folder / "attention.md").exists()

    monkeypatch.setattr(attention_cells, "measure_cell", whole)
    before = results(folder)[1]
    assert script("attention", *TINY, "--resume")[0] == 0
    _, after = results(folder)
    assert len(after.cells) == 8
    assert all(after.by[key] == cost for key, cost in before.by.items())  # measured once


def test_other_circumstances_are_not_taken_up(script, folder):
    one = ["--lengths", "1", "--head-dims", "16", "--seconds", "0.01", "--methods", "sdpa"]
    assert script("attention", *one, "--heads", "2")[0] == 0
    code, _, err = script("attention", *one, "--heads", "3", "--resume")
    assert code == 1
    assert "was measured with shape {'batch_size': 1, 'heads': 2, 'device': 'cpu'}" in err


def test_a_method_that_nobody_knows_is_refused(script):
    code, _, err = script("attention", *TINY, "--methods", "nonsense")
    assert code == 1
    assert (
        "no method is called nonsense; there are native, chunked, specialised, sdpa" in err
        or "chunked, specialised, sdpa, native" in err
    )


def test_nothing_is_measured_of_what_is_wrong(script, folder, monkeypatch):
    right = baselines.tarnn_attend
    monkeypatch.setattr(baselines, "tarnn_attend", lambda q, k, v, causal: right(q, k, v, causal) * 1.0001)
    code, _, err = script("attention", *TINY)
    assert code == 1
    assert "the check is red" in err
    assert "float64: o is 1.0e-04 off the definition" in err
    assert not folder.exists()


def install(monkeypatch, name, **functions):
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def quadratic_product(q, k, v, causal):
    weights = q @ k.mT
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


def test_methods_that_are_installed_take_part(script, folder, monkeypatch):
    theirs = ModuleType("performer_pytorch.performer_pytorch")
    theirs.causal_linear_attention_noncuda = lambda q, k, v: quadratic_product(q, k, v, True)
    theirs.linear_attention = lambda q, k, v: quadratic_product(q, k, v, False)
    install(monkeypatch, "performer_pytorch", performer_pytorch=theirs)

    class Layer:  # of fast-transformers: (b, t, h, d), float32 only
        def __init__(self, width):
            self.width = width

        def __call__(self, q, k, v, mask, lengths, key_lengths):
            if q.dtype != torch.float32:
                raise TypeError("expected float32")
            q, k, v = ((elu(q) + 1).transpose(1, 2), (elu(k) + 1).transpose(1, 2), v.transpose(1, 2))
            assert q.shape[-1] == self.width
            assert mask.lower_triangular != mask.all_ones
            assert key_lengths.float_matrix.shape == (q.shape[0], q.shape[2])
            return quadratic_product(q, k, v, mask.lower_triangular).transpose(1, 2)

    install(monkeypatch, "fast_transformers")
    install(monkeypatch, "fast_transformers.attention", CausalLinearAttention=Layer, LinearAttention=Layer)
    names = ["--methods", "sdpa", "fast-transformers", "performer"]
    assert script("attention", *TINY, *names)[0] == 0
    data, costs = results(folder)
    assert {(c.method, c.dtype) for c in costs.by.values()} == {
        ("sdpa", "float32"),
        ("sdpa", "bfloat16"),
        ("fast-transformers", "float32"),
        ("performer", "float32"),
    }
    assert data["absent"]["fast-transformers in bfloat16"] == "TypeError: expected float32"
    assert "off the definition" in data["absent"]["performer in bfloat16"]  # its sums are bfloat16


def test_a_method_that_is_broken_is_named_and_left_out(monkeypatch):
    install(monkeypatch, "performer_pytorch")  # without what it should have
    _, absent = baselines.available()
    assert absent["performer"].startswith("does not import: ImportError")


def cost(ms, peak, cell):
    return Cost("sdpa", "float32", cell, ms, ms, ms, 5, 1, peak, 0, None)


def test_what_would_take_too_long_or_too_much_memory_is_not_tried(monkeypatch):
    short, cell = Cell(1024, 64, True, False), Cell(4096, 64, True, False)
    quadratic, linear = Method("sdpa", baselines.sdpa, power=2), Method("sdpa", baselines.sdpa)
    costs = Costs([cost(1000, 2**20, short), cost(9e9, 2**20, Cell(1024, 64, False, False))])
    assert (
        attention_cells.too_much(quadratic, "float32", cell, costs, 15)
        == "one call would take about 16 s, by t = 1,024"
    )
    assert attention_cells.too_much(quadratic, "float32", cell, costs, 17) == ""
    assert attention_cells.too_much(linear, "float32", cell, costs, 15) == ""
    assert attention_cells.too_much(linear, "bfloat16", cell, costs, 15) == ""  # nothing known
    monkeypatch.setattr(attention_cells, "total_memory", lambda: 2**23 - 1)
    assert "GiB" in attention_cells.too_much(linear, "float32", cell, costs, 15)
    monkeypatch.setattr(attention_cells, "total_memory", lambda: 2**23)
    assert attention_cells.too_much(linear, "float32", cell, costs, 15) == ""


def test_what_is_left_out_is_listed_once(script, folder):
    options = one_head("1", "40", kind="full")
    options += ["--passes", "forward", "--seconds", "0.01", "--methods", "sdpa", "--longest-call", "1e-9"]
    assert script("attention", *options)[0] == 0
    assert script("attention", *options, "--resume")[0] == 0
    data, costs = results(folder)
    [skipped] = data["skipped"]
    assert (skipped["method"], skipped["t"], [c.t for c in costs.cells]) == ("sdpa", 40, [1])
    assert "sdpa, float32, t = 40, d = 16, forward, full: one call would take" in (folder / "attention.md").read_text()
