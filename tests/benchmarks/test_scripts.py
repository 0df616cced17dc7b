"""Each benchmark runs through at a tiny size, and measures nothing of what is wrong."""

import sys

import encoder_step
import fused_step
import generate
import pytest
import step
import torch
from support.scripts import lines_of, runnable
from toolkit import attention_cells, baselines, model_steps
from toolkit.attention_cells import Cell, Cost, Costs

from scripts.common.clock import Effort
from tarnn.kernels.cpu import library

ONE_CELL = ["--lengths", 40, "--heads", 2, "--seconds", 0.01]
ATTENTION = [*ONE_CELL, "--head-dims", 16, "--kinds", "causal", "--passes", "both"]
MODELS = ["--lengths", 8, 16, "--layers", 1]
OPTIONS = {
    "attention": ATTENTION,
    "convolution": ["--quick", "--length", 20, "--rounds", 1],
    "decode": ["--quick"],
    "decode_baselines": ["--quick"],
    "delta": ["--quick", "--python", sys.executable],
    "drafts": ["--quick"],
    "encoder_step": ["--quick"],
    "experts": ["--quick"],
    "families": ["--quick", "--cases", "lora", "--rounds", 1, "--shrink", 64],
    "favor": ["--quick", *ONE_CELL, "--features", 6, "--head-dim", 8],
    "finetune": ["--quick"],
    "first_token": ["--quick"],
    "fused_step": ["--quick"],
    "generate": ["--quick"],
    "low_rank": ["--quick"],
    "one_call": ["--quick", "--families", "Mamba-2", "--layers", 1, "--prompt", 8],
    "opening": ["--quick"],
    "optimal_attention": ["--quick", *MODELS, "--hidden-size", 32, "--features", 4],
    "prefill": ["--quick"],
    "products": ["--quick"],
    "scan": ["--quick"],
    "serve": ["--quick"],
    "step": ["--quick"],
    "training_step": [*MODELS, "--tokens", 32],
}
NEED_KERNELS = {
    "decode_baselines",
    "drafts",
    "experts",
    "first_token",
    "fused_step",
    "generate",
    "one_call",
    "opening",
    "prefill",
    "serve",
}
NOT_RUN = ("all", "sequence_parallel")  # the one runs the others, the other needs several processes
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a renamed property


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(model_steps, "EFFORT", Effort(0, rounds=(3, 3)))
    # what other processes take must not decide how long a test is
    monkeypatch.setattr("scripts.common.results.TRIES", 1)
    for module in (step, fused_step):
        monkeypatch.setattr(module, "LARGE", 2**20)
    for module in (fused_step, generate):
        monkeypatch.setattr(module, "SIZES", dict.fromkeys(module.SIZES, (64, 1)))


def test_every_script_is_run():
    assert {*OPTIONS, *NOT_RUN} == set(runnable("benchmarks"))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_quick_run_leaves_its_results(name, script, folder, data_of):
    if name in NEED_KERNELS and not library.available():
        pytest.skip("no compiled kernels here")
    code, out, err = script(name, *OPTIONS[name])
    assert code == 0, err
    data = data_of(name)
    assert data["results"]
    assert data["command"].startswith(f"python benchmarks/{name}.py --threads 1 {OPTIONS[name][0]}")
    page = (folder / f"{name}.md").read_text()
    assert page.startswith("# ")
    assert "\n| " in page
    assert str(folder / f"{name}.json") in out
    if name in CLAIMS:
        CLAIMS[name](data["results"])


def of_families(results):
    steps = results["lora"]
    assert steps["tarnn"]["loss"] == pytest.approx(steps["transformers"]["loss"], rel=0.01)


def of_the_server(found):
    others = {name for name, x in found.items() if "missing" in x}
    assert all("no environment was named" in found[name]["missing"] for name in others), found
    assert found["speeds, float32"]["2"]["tokens"] == 2 * 8
    prefix = found["prefix, float32"]
    assert [prefix[x]["cached"] for x in ("cold", "state", "sent again, token ids")] == [0, 300, 300]
    talks = found["talks, float32"]
    assert talks["response"]["again"] == 0 < talks["response"]["read"]
    assert talks["prompt"]["last_prompt"] > talks["prompt"]["again"]
    overload = found["overload, float32"]
    assert 0 < overload["refused"] < overload["requests"]
    assert found["parked, float32"]["number"] == 20


CLAIMS = {"families": of_families, "serve": of_the_server}


def test_a_picture_shows_what_was_measured(script, folder, data_of, pictures):
    assert script("attention", *ATTENTION).code == 0
    costs = Costs.from_json(data_of("attention"))
    both = lines_of(pictures["attention.png"].axes[1])
    assert both["SDPA (softmax)"] == ([40], [costs.get("sdpa", "float32", Cell(40, 16, True, True)).ms])


def a_thousandth_off(function):
    return lambda *args, **options: 1.001 * function(*args, **options)


def second_call_off(function):
    calls = []
    return lambda *args: function(*args) * (calls.append(1) or 1.001 if len(calls) == 1 else calls.append(1) or 1.0)


@pytest.mark.parametrize(
    ("name", "module", "function", "wrong", "words"),
    [
        ("attention", baselines, "tarnn_attend", a_thousandth_off, "nothing is measured"),
        ("favor", None, "linear_attention", a_thousandth_off, "nothing is measured"),
        ("generate", None, "write", lambda _: lambda *_: torch.zeros(1, 12).long(), "nothing is measured"),
        ("training_step", model_steps, "step", second_call_off, "off plain PyTorch by"),
        ("optimal_attention", model_steps, "step", second_call_off, "off plain PyTorch by"),
        ("encoder_step", encoder_step, "train_step", second_call_off, "off plain PyTorch by"),
    ],
)
def test_nothing_is_measured_of_what_is_wrong(script, folder, monkeypatch, name, module, function, wrong, words):
    module = module or __import__(name)
    monkeypatch.setattr(module, function, wrong(getattr(module, function)))
    code, _, err = script(name, *OPTIONS[name])
    assert (code, words in err, folder.exists()) == (1, True, False), err


def test_an_interrupted_run_keeps_what_it_has_and_is_taken_up_again(script, data_of, monkeypatch):
    measured, whole = [], attention_cells.measure_cell

    def interrupted(cell, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(cell)
        return whole(cell, *rest)

    two_cells = [*ATTENTION, "--passes", "forward", "both"]
    monkeypatch.setattr(attention_cells, "measure_cell", interrupted)
    code, _, err = script("attention", *two_cells)
    assert (code, "--resume goes on" in err) == (130, True)
    before = Costs.from_json(data_of("attention"))
    assert before.cells == measured
    monkeypatch.setattr(attention_cells, "measure_cell", whole)
    assert script("attention", *two_cells, "--resume").code == 0
    after = Costs.from_json(data_of("attention"))
    assert len(after.cells) > len(before.cells)
    assert all(after.by[key] == cost for key, cost in before.by.items())  # measured once
    for more, words in (
        (["--heads", 3, "--resume"], "was measured with shape"),
        (["--methods", "x"], "no method is called x"),
    ):
        code, _, err = script("attention", *two_cells, *more)
        assert (code, words in err) == (1, True)


def test_what_would_take_too_long_or_too_much_memory_is_not_tried(monkeypatch):
    short, cell = Cell(1024, 64, True, False), Cell(4096, 64, True, False)
    quadratic = baselines.Method("sdpa", baselines.sdpa, power=2)
    costs = Costs([Cost("sdpa", "float32", short, 1000, 1000, 1000, 5, 1, 2**20, 0, None)])
    too_much = attention_cells.too_much
    assert too_much(quadratic, "float32", cell, costs, 15) == "one call would take about 16 s, by t = 1,024"
    assert too_much(quadratic, "float32", cell, costs, 17) == ""
    monkeypatch.setattr(attention_cells, "total_memory", lambda: 2**23 - 1)
    assert "GiB" in too_much(quadratic, "float32", cell, costs, 17)
