"""benchmarks/step.py, training_step.py, parts.py and summary.py with tiny sizes and made-up figures."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import fused_step
import generate
import model_steps
import parts
import pytest
import step as step_script
import summary
import torch
import training_profile
import training_step
from support.scripts import lines_of

from scripts.common.clock import Effort, Timing
from scripts.common.results import Unmeasured
from tarnn import LinearState
from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.stack import FORMATS


def timing(ms):
    return Timing(ms, ms, ms, 5, 1, 2**20)


def test_steps_are_measured_and_judged(script, folder, monkeypatch):
    monkeypatch.setattr(step_script, "LARGE", 2**20)
    code, out, _ = script("step", "--quick")
    assert code == 0
    data = json.loads((folder / "step.json").read_text())
    assert set(data["results"]) == {"1", "128"}
    for timings in data["results"].values():
        assert {"tarnn.step", "tarnn.step, batch 0", "copy_", "copy_, large"} <= timings.keys()
        assert ("the operator alone" in timings) == library.available()
        assert ("the operator alone, batch 0" in timings) == library.available()
    text = (folder / "step.md").read_text()
    assert "| tarnn.step | 128 |" in text
    assert ("At batch 1 the function takes" in text) == library.available()
    assert str(folder / "step.md") in out


@torch.no_grad()
def test_the_operator_alone_does_what_the_function_does():
    if not library.available():
        pytest.skip("no native kernels here")
    q, k, v = (torch.randn(2, 3, 1, 5) for _ in range(3))
    state, expected = (LinearState.zeros(2, 3, 5, 5) for _ in range(2))
    once = lambda state: step_script.step(q, k, v, step_script.PHI, state, inplace=True)  # noqa: E731
    operator = step_script.operator_call(lambda: once(state))
    operator()
    once(expected)
    once(expected)
    assert all(torch.equal(x, expected.tensors()[name]) for name, x in state.tensors().items())
    with library.disabled():
        assert step_script.operator_call(lambda: once(state)) is None


@pytest.mark.parametrize(("ms", "met"), [(0.0180, True), (0.0181, False)])
def test_a_step_is_held_against_an_empty_call_and_its_state_copied(monkeypatch, ms, met):
    monkeypatch.setattr(step_script.library, "available", lambda: True)
    one = {"tarnn.step": ms, "tarnn.step, batch 0": 0.008, "copy_": 0.005, "copy_, empty": 0.001}
    many = {"tarnn.step": 10.0, "copy_": 6.9 if not met else 7.0, "copy_, empty": 0.001}
    found = {1: {k: timing(v) for k, v in one.items()}, 128: {k: timing(v) for k, v in many.items()}}
    judged = [t for t in step_script.targets(found) if t.case == "tarnn.step"]
    assert [t.met for t in judged] == [met, met]
    assert all(t.met is None for t in step_script.targets(found) if t.case != "tarnn.step")


def test_generate_is_measured_where_all_ways_write_the_same(script, folder, monkeypatch):
    if not library.available():
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(generate, "SIZES", dict.fromkeys(generate.SIZES, (64, 1)))
    code, _, _ = script("generate", "--quick")
    assert code == 0
    [found] = json.loads((folder / "generate.json").read_text())["results"].values()
    assert set(found["timings"]) == {generate.OWN, generate.UNASKED, generate.INT8, generate.LOOP, generate.LLAMA}
    assert "| 256 × 8 | 0.1 M |" in (folder / "generate.md").read_text()
    monkeypatch.setattr(generate, "write", lambda *_: torch.zeros(1, 12, dtype=torch.long))
    code, _, err = script("generate", "--quick")
    assert code == 1
    assert "the token loop wrote another text" in err


def test_fused_steps_are_measured_and_judged(script, folder, monkeypatch):
    if not library.available():
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(fused_step, "LARGE", 2**20)
    monkeypatch.setattr(fused_step, "SIZES", dict.fromkeys(fused_step.SIZES, (64, 1)))
    code, _, _ = script("fused_step", "--quick")
    assert code == 0
    data = json.loads((folder / "fused_step.json").read_text())
    assert list(data["results"]) == ["one thread, 13 M", "quiet, batch 16", "busy, batch 16"]
    assert [t["measured"] for t in data["targets"]] == [1] * (len(FORMATS) + 4)
    assert "## Two threads, 25 M parameters" in (folder / "fused_step.md").read_text()


TINY = ["--lengths", "8", "16", "--tokens", "32", "--layers", "1"]


def test_a_training_step_is_measured_and_judged(script, folder, pictures, monkeypatch):
    monkeypatch.setattr(model_steps, "EFFORT", Effort(0, rounds=(3, 3)))
    code, out, _ = script("training_step", *TINY, "--optimizer", "adamw", "--methods", *training_step.METHODS)
    assert code == 0
    data = json.loads((folder / "training_step.json").read_text())
    assert list(data["results"]) == ["8", "16"]
    assert set(data["results"]["8"]) == set(training_step.METHODS)
    assert [t["met"] for t in data["targets"]][:2] == [None, None]  # no such lengths
    text = (folder / "training_step.md").read_text()
    assert "adamw's update" in text
    times, sizes = pictures["training_step.png"].axes
    expected = {m: ([8, 16], [at[m]["ms"] for at in data["results"].values()]) for m in training_step.METHODS}
    assert lines_of(times) == expected
    assert (times.get_ylabel(), sizes.get_ylabel()) == ("milliseconds per step", "peak MiB")
    assert "## Goals:" in out


def test_training_is_measured_only_where_the_gradients_are_right(script, folder, wrong_gradients):
    code, _, err = script("training_step", *TINY)
    assert code == 1
    assert "off plain PyTorch by 1.0e-03" in err
    assert not folder.exists()


def test_training_targets():
    found = {
        4096: {"linear": timing(10), "softmax": timing(20), "projections": timing(9)},
        16384: {"linear": timing(10), "softmax": timing(59), "projections": timing(8)},
    }
    twice, six_times, none = training_step.targets(found)
    assert (twice.met, six_times.met, none.met) == (True, False, False)
    assert none.worst == ("t = 16,384", 1.25)


def test_projections_alone_have_all_products_of_a_step_but_attentions():
    """Every matrix of a layer has a gradient; attention costs nothing: o is v."""
    model = training_step.make_model("projections", 1)
    tokens = model_steps.draw_tokens(2, 5)
    model_steps.step(model, tokens)
    layer = model.model.layers[0].attention
    assert all(x.weight.grad.any() for x in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj))
    x = torch.randn(2, 5, layer.hidden_size)
    assert torch.equal(layer(x), layer.o_proj(layer.v_proj(x)))


def test_a_training_step_is_taken_apart(script, folder):
    """By a process that trains, and pauses after each round."""
    code, _, _ = script("training_profile", "--quick", "--rounds", 2)
    assert code == 0
    found = json.loads((folder / "training_profile.json").read_text())["results"]["now"]
    assert found["parts_ms"]["matrix products"] > 0
    assert found["share_min"] <= found["share"] <= found["share_max"]
    # all but the norms, the decays' bias and the embedding, which is the last layer's matrix
    weights = found["products_ms"] * found["gflops_of_mm"] / 6 / training_profile.TOKENS * 1e6
    assert 0.99 < weights / found["parameters"] < 1
    assert "products' share of it" in (folder / "training_profile.md").read_text()


def test_a_contender_that_ends_too_early_is_no_measurement():
    with (
        subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True) as ended,
        pytest.raises(Unmeasured, match="ended before its time"),
    ):
        training_profile.answer(ended)


def test_operators_have_their_parts():
    parts = {x: training_profile.part_of(x) for x in ("aten::mm", "tarnn_cpu::rms_norm_backward", "aten::view")}
    assert list(parts.values()) == ["matrix products", "norms", training_profile.REST]


SAMPLE = "void tarnn::avx512::{}<float>(float*, tarnn::avx512::Keys<float> const&)"


@pytest.mark.parametrize(
    ("frames", "part"),
    [
        (
            ["T tarnn::avx2::exp_nonpositive<float>(T)", SAMPLE.format("load_rows"), SAMPLE.format("load_keys")],
            "features",
        ),
        (["void tarnn::avx512::matmul<(tarnn::avx512::Part)0, float>(long)"], "state"),
        (["void tarnn::avx512::matmul<(tarnn::avx512::Part)12, float>(long)"], "in-chunk"),
        (
            ["void tarnn::avx512::columns<(tarnn::avx512::Part)0, 4, float>(long)", "tarnn::avx512::reverse<float>()"],
            "state",
        ),
        (
            ["void tarnn::avx512::panels<(tarnn::avx512::Part)0, float>(long)", "tarnn::avx512::pairs<float>()"],
            "in-chunk",
        ),
        ([SAMPLE.format("mask_pairs")], "in-chunk"),
        (["clear_page", "asm_exc_page_fault", SAMPLE.format("store_tile")], "page faults"),
        ([SAMPLE.format("store_tile"), SAMPLE.format("causal_outputs")], "loads and stores"),
        ([SAMPLE.format("causal_outputs")], "rest of the kernels"),
        (["_PyEval_EvalFrameDefault"], "overhead"),
    ],
)
def test_samples_are_counted_for_the_innermost_function_that_has_a_part(frames, part):
    assert parts.part_of(frames) == part


def test_parts_are_of_functions_that_there_are():
    source = "".join(path.read_text() for path in (parts.ROOT / "csrc").rglob("*.h"))
    for names in parts.PARTS.values():
        for name in names.split("|"):
            plain = re.match(r"\w+", name)[0]
            assert re.search(rf"\b{plain}{'' if plain.endswith('_') else '[(<]'}", source), plain


def test_parts_add_up_and_what_no_part_claims_is_named():
    samples = [[SAMPLE.format("feature")]] * 3 + [["python"]]
    shares, others = parts.parts_of(samples)
    assert shares == {"features": 0.75, "overhead": 0.25}
    assert others == {"python": 0.25}
    row = {"t": 7, "d": 5, "causal": True, "backward": False, "dtype": "float32", "ms": 8.0, "shares": shares}
    facts = {
        "command": "c",
        "date": "2026-11-22",
        "machine": {"cpu": "x"},
        "threads": 1,
        "versions": {"torch": "t"},
        "kernels": "k",
    }
    table = parts.report(SimpleNamespace(heads=8), facts, [row]).splitlines()
    assert table[-1] == "| float32 | yes | forward | 5 | 7 | 8.00 | 6.00 (75%) | 2.00 (25%) |"


def test_a_frame_of_perf_script_is_read():
    line = "\t            6cd0 tarnn::run(long) (.part.0) (/a b/libtarnn_cpu.so)"
    assert parts._frame(line) == ("6cd0", "tarnn::run(long) (.part.0)", "/a b/libtarnn_cpu.so")


def test_the_summary_is_made_of_what_is_there(script, folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["summary.py", "--results", str(folder)])
    assert summary.main() == 1
    assert "no results" in capsys.readouterr().err
    options = ["--lengths", "128", "--head-dims", "64", "--heads", "1", "--dtypes", "float32", "--seconds", "0.01"]
    assert script("attention", *options, "--methods", "sdpa")[0] == 0
    monkeypatch.setattr(sys, "argv", ["summary.py", "--results", str(folder)])
    assert summary.main() == 0
    text = capsys.readouterr().out
    assert "| t | SDPA (softmax), forward | SDPA (softmax), forward + backward |" in text
    assert "\n| 128 | " in text
    assert "Of 0 goals that were measured, 0 are met." in text


def test_baselines_of_decoding_that_are_missing_are_named(script, folder):
    if not library.available():
        pytest.skip("no compiled kernels here")
    code, _, _ = script("decode_baselines", "--quick")
    assert code == 0
    found = json.loads((folder / "decode_baselines.json").read_text())["results"]
    assert {kind for kind, x in found.items() if "ms" in x} >= {
        f"tarnn, {a}: {w}" for a in ("softmax", "linear") for w in FORMATS
    }
    assert "no bfloat16 products" in found["onnxruntime: bfloat16"]["missing"]
    assert "llama.cpp, int4: ModuleNotFoundError" in (folder / "decode_baselines.md").read_text()
