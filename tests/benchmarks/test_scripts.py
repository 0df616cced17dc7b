"""Each benchmark runs through at a tiny size, and measures nothing of what is wrong."""

import sys

import encoder_step
import fused_step
import generate
import pytest
import step
import summary
import torch
from support.scripts import lines_of, opens, runnable
from toolkit import attention_cells, baselines, model_steps
from toolkit.attention_cells import Cell, Cost, Costs

from scripts.common.clock import Effort
from tarnn.kernels.cpu import library

ONE_CELL = ["--lengths", 40, "--heads", 2, "--seconds", 0.01]
ATTENTION = [*ONE_CELL, "--head-dims", 16, "--kinds", "causal", "--passes", "both"]
FAVOR = ["--quick", *ONE_CELL, "--features", 6, "--head-dim", 8]
MODELS = ["--lengths", 8, 16, "--layers", 1]
OPTIONS = {
    "attention": ATTENTION,
    "convolution": ["--quick", "--length", 20, "--rounds", 1],
    "decode": ["--quick"],
    "decode_baselines": ["--quick"],
    "delta": ["--quick", "--python", sys.executable],
    "encoder_step": ["--quick"],
    "favor": FAVOR,
    "fused_step": ["--quick"],
    "generate": ["--quick"],
    "low_rank": ["--quick"],
    "one_call": ["--quick", "--families", "Mamba-2", "--layers", 1, "--prompt", 8],
    "prefill": ["--quick"],
    "optimal_attention": ["--quick", *MODELS, "--hidden-size", 32, "--features", 4],
    "products": ["--quick"],
    "scan": ["--quick"],
    "step": ["--quick"],
    "training_step": [*MODELS, "--tokens", 32],
}
NEED_KERNELS = {"decode_baselines", "fused_step", "generate", "one_call", "prefill"}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(model_steps, "EFFORT", Effort(0, rounds=(3, 3)))
    monkeypatch.setattr(
        "scripts.common.results.TRIES", 1
    )  # or what other processes take would decide how long a test is
    for module in (step, fused_step):
        monkeypatch.setattr(module, "LARGE", 2**20)
    for module in (fused_step, generate):
        monkeypatch.setattr(module, "SIZES", dict.fromkeys(module.SIZES, (64, 1)))


@pytest.mark.slow  # three processes that import transformers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a property that transformers has renamed
def test_steps_of_linear_models(script, folder, data_of):
    assert script("families", "--cases", "lora", "--rounds", 1, "--shrink", 64).code == 0
    steps = data_of("families")["results"]["lora"]
    assert set(steps) == {"transformers", "tarnn"}
    assert steps["tarnn"]["loss"] == pytest.approx(steps["transformers"]["loss"], rel=0.01)
    assert "adapters" in (folder / "families.md").read_text()


@pytest.mark.parametrize("name", runnable("benchmarks"))
def test_every_script_opens(name, monkeypatch):
    assert opens(name, monkeypatch)


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


@pytest.mark.slow  # a dozen servers, one after the other
def test_a_server_is_measured_whole(script, folder, data_of):
    if not library.available():
        pytest.skip("no compiled kernels here")
    assert script("serve", "--quick").code == 0
    found = data_of("serve")["results"]
    others = {name for name, x in found.items() if "missing" in x}
    assert all("no environment was named" in found[name]["missing"] for name in others), found
    assert len(others) == 4
    speed = found["speeds, float32"]["2"]
    assert speed["tokens"] == 2 * 8
    prefix = found["prefix, float32"]
    assert (prefix["cold"]["cached"], prefix["state"]["cached"]) == (0, 300)
    assert prefix["sent again, token ids"]["cached"] == 300
    talks = found["talks, float32"]
    assert talks["response"]["again"] == 0
    assert talks["response"]["read"] > 0
    assert talks["prompt"]["last_prompt"] > talks["prompt"]["again"]
    overload = found["overload, float32"]
    assert 0 < overload["refused"] < overload["requests"]
    assert found["parked, float32"]["number"] == 20
    page = (folder / "serve.md").read_text()
    assert "| tarnn, from its state | float32 |" in page
    assert "llama.cpp, float32: no environment was named" in page


def test_a_picture_shows_what_was_measured(script, folder, data_of, pictures):
    assert script("attention", *ATTENTION).code == 0
    costs = Costs.from_json(data_of("attention"))
    both = lines_of(pictures["attention.png"].axes[1])
    assert both["SDPA (softmax)"] == ([40], [costs.get("sdpa", "float32", Cell(40, 16, True, True)).ms])


def scaled(function):
    """The same, a thousandth off."""
    return lambda *args, **options: 1.001 * function(*args, **options)


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [("attention", baselines, "tarnn_attend"), ("favor", None, "linear_attention"), ("generate", None, "write")],
)
def test_nothing_is_measured_of_what_is_wrong(script, folder, monkeypatch, name, module, function):
    if name in NEED_KERNELS and not library.available():
        pytest.skip("no compiled kernels here")
    module = module or __import__(name)
    wrong = scaled(getattr(module, function))
    monkeypatch.setattr(module, function, wrong if name != "generate" else lambda *_: torch.zeros(1, 12).long())
    code, _, err = script(name, *OPTIONS[name])
    assert (code, "nothing is measured" in err, folder.exists()) == (1, True, False), err


@pytest.mark.parametrize(
    ("name", "module", "function"),
    [
        ("training_step", model_steps, "step"),
        ("optimal_attention", model_steps, "step"),
        ("encoder_step", encoder_step, "train_step"),
    ],
)
def test_no_model_is_measured_whose_gradients_are_wrong(script, folder, monkeypatch, name, module, function):
    right, calls = getattr(module, function), []

    def second_is_off(*args):
        calls.append(args)
        return right(*args) * (1.001 if len(calls) == 2 else 1.0)

    monkeypatch.setattr(module, function, second_is_off)
    code, _, err = script(name, *OPTIONS[name])
    assert (code, "off plain PyTorch by" in err, folder.exists()) == (1, True, False), err


@pytest.mark.slow
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
    code, _, err = script("attention", *two_cells, "--heads", 3, "--resume")
    assert (code, "was measured with shape" in err) == (1, True)


def test_what_would_take_too_long_or_too_much_memory_is_not_tried(monkeypatch):
    short, cell = Cell(1024, 64, True, False), Cell(4096, 64, True, False)
    quadratic = baselines.Method("sdpa", baselines.sdpa, power=2)
    costs = Costs([Cost("sdpa", "float32", short, 1000, 1000, 1000, 5, 1, 2**20, 0, None)])
    too_much = attention_cells.too_much
    assert too_much(quadratic, "float32", cell, costs, 15) == "one call would take about 16 s, by t = 1,024"
    assert too_much(quadratic, "float32", cell, costs, 17) == ""
    monkeypatch.setattr(attention_cells, "total_memory", lambda: 2**23 - 1)
    assert "GiB" in too_much(quadratic, "float32", cell, costs, 17)


def test_a_method_that_is_not_known_is_refused(script):
    code, _, err = script("attention", *ATTENTION, "--methods", "nonsense")
    assert (code, "no method is called nonsense; there are" in err) == (1, True)


def test_the_summary_is_made_of_what_is_there(script, folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["summary.py", "--results", str(folder)])
    assert summary.main() == 1
    assert "no results" in capsys.readouterr().err
    options = ["--lengths", 128, "--head-dims", 64, "--heads", 1, "--dtypes", "float32", "--seconds", 0.01]
    assert script("attention", *options, "--methods", "sdpa").code == 0
    monkeypatch.setattr("sys.argv", ["summary.py", "--results", str(folder)])
    assert summary.main() == 0
    assert "\n| 128 | " in capsys.readouterr().out
