"""Which library computes a command's float32 products: said, recorded, taken again, and undone at the end."""

import json
import shutil

import pytest
import torch

from tarnn import matmul
from tarnn.data.tensor_file import recorded_precision
from tarnn.decoding.choice import ChosenStep
from tarnn.decoding.loop import TokenLoop
from tarnn.kernels.cpu import library
from tarnn.matmul import FAST, HIGHEST, precision_now
from tarnn.training.products import BF16_UNUSED
from tarnn.training.safe_trainer import SafeTrainer


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """A processor on which oneDNN multiplies in float32, and models that are large enough for it."""
    monkeypatch.delenv(matmul.VARIABLE, raising=False)
    monkeypatch.setattr(matmul, "LEAST", 0)
    monkeypatch.setattr(matmul, "switches_library", lambda: True)
    monkeypatch.setattr(matmul, "error_ratio", lambda shapes: 1.5)
    yield
    assert (precision_now(), matmul._entered) == (HIGHEST, [])


@pytest.fixture
def seen(monkeypatch):
    """The precisions under which steps were trained or tokens were read."""
    precisions = set()

    def spy(owner, name):
        method = getattr(owner, name)

        def call(*arguments, **options):
            precisions.add(precision_now())
            return method(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    spy(SafeTrainer, "compute_loss")
    spy(SafeTrainer, "evaluate")
    spy(TokenLoop, "read")
    return precisions


def weights(run, step):
    return (run / "checkpoints" / f"checkpoint-{step}" / "model.safetensors").read_bytes()


def marker(run, step):
    return run / "checkpoints" / f"checkpoint-{step}" / "complete.json"


def test_a_run_says_and_records_its_products_and_goes_on_with_them(train, tmp_path, seen, monkeypatch):
    options = ("--sample-tokens", 0, "--steps", 4, "--save-every", 2)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    code, _, stderr = train(*options, out=whole)
    assert (code, seen) == (0, {FAST})
    assert "products  medium: oneDNN in float32, which keeps its precision here\n" in stderr
    assert json.loads((whole / "settings.json").read_text())["run"]["matmul_precision"] == FAST
    assert json.loads(marker(whole, 4).read_text())["matmul_precision"] == FAST
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-4")
    monkeypatch.setattr(matmul, "LEAST", 10**12)  # what began with oneDNN goes on with it
    code, _, stderr = train(*options, "--resume", out=resumed)
    assert (code, seen) == (0, {FAST})
    assert "may differ" not in stderr
    assert weights(resumed, 4) == weights(whole, 4)
    monkeypatch.setattr(matmul, "error_ratio", lambda shapes: 1e3)  # another processor
    seen.clear()
    code, _, stderr = train(*options, "--resume", "--steps", 5, out=resumed)
    assert (code, seen) == (0, {HIGHEST})
    assert "computed with precision 'medium' before; here they are with 'highest' (oneDNN rounds them here" in stderr


def test_a_run_from_before_there_was_a_choice_goes_on_as_it_began(train, tmp_path, seen, monkeypatch):
    monkeypatch.setenv(matmul.VARIABLE, "off")
    options = ("--sample-tokens", 0)
    assert train(*options, "--steps", 4)[0] == 0
    content = json.loads(marker(tmp_path / "run", 4).read_text())
    assert content.pop("matmul_precision") == HIGHEST
    marker(tmp_path / "run", 4).write_text(json.dumps(content))
    monkeypatch.delenv(matmul.VARIABLE)
    code, _, stderr = train(*options, "--steps", 8, "--resume")
    assert (code, seen) == (0, {HIGHEST})
    assert "products  highest: as recorded\n" in stderr


def test_a_state_goes_on_with_the_products_that_read_it(command, checkpoints, tmp_path, seen, monkeypatch):
    plain = lambda model, *args, **options: ChosenStep(model.step, "plain step")  # noqa: E731
    monkeypatch.setattr("tarnn.cli.step.fastest_step", plain)  # a fused step has products of its own
    line = ("generate", checkpoints["linear"], "--max-new-tokens", 0)
    state = ("--state-in", tmp_path / "a", "--state-out", tmp_path / "b")
    outcome = command(*line, "--prompt", "Call me", "--state-out", tmp_path / "a")
    assert (outcome.code, seen, recorded_precision(tmp_path / "a")) == (0, {FAST}, FAST)
    assert "products medium: oneDNN in float32" in outcome.err
    monkeypatch.setattr(matmul, "LEAST", 10**12)
    assert command(*line, *state, "--prompt", " Ishmael").code == 0
    assert (seen, recorded_precision(tmp_path / "b")) == ({FAST}, FAST)
    monkeypatch.setenv(matmul.VARIABLE, "off")
    seen.clear()
    outcome = command(*line, *state, "--prompt", " Ishmael")
    assert (outcome.code, seen, recorded_precision(tmp_path / "b")) == (0, {HIGHEST}, HIGHEST)
    assert "computed with precision 'medium' before" in outcome.err
    assert command(*line, *state, "--prompt", "").code == 0  # nothing is read, and nothing changes
    assert recorded_precision(tmp_path / "b") == FAST


@pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")
def test_a_fused_step_reads_with_products_of_its_own(command, checkpoints, tmp_path, seen):
    line = ("generate", checkpoints["linear"], "--max-new-tokens", 0, "--state-out", tmp_path / "a")
    outcome = command(*line, "--prompt", "Call me")
    assert (outcome.code, seen, recorded_precision(tmp_path / "a")) == (0, {HIGHEST}, HIGHEST)
    assert "products" not in outcome.err


def test_eval_and_info_say_it_too(command, train, tmp_path, monkeypatch):
    assert train("--steps", 4, "--sample-tokens", 0)[0] == 0
    expected = "medium: oneDNN in float32, which keeps its precision here"
    assert f"tarnn: float32 products {expected}\n" in command("eval", tmp_path / "run").err
    assert expected in command("info").out
    assert json.loads(command("info", "--json").out)["products"]["precision"] == FAST
    monkeypatch.setenv(matmul.VARIABLE, "perhaps")
    assert command("info").is_refusal("TARNN_FAST_MATMUL=perhaps", "expected on or off")


def test_what_the_caller_has_set_in_torch_wins(train, seen):
    torch.set_float32_matmul_precision("high")
    try:
        code, _, stderr = train("--steps", 4, "--sample-tokens", 0)
        assert precision_now() == "high"
    finally:
        torch.set_float32_matmul_precision(HIGHEST)
    assert (code, seen) == (0, {"high"})
    assert "products  high: set in torch by the caller\n" in stderr


def test_a_processor_with_bfloat16_is_mentioned_where_it_is_not_used(train, monkeypatch):
    short = ("--steps", 1, "--sample-tokens", 0, "--val-fraction", 0, "--overwrite")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    assert f"\ntarnn: {BF16_UNUSED}\n" in train(*short)[2]
    assert BF16_UNUSED not in train(*short, "--bf16")[2]
    shapes = ((16, 32, 32),)
    assert matmul.gains_from_bfloat16(shapes)
    monkeypatch.setattr(matmul, "LEAST", 10**12)
    assert not matmul.gains_from_bfloat16(shapes)
    monkeypatch.setattr(matmul, "LEAST", 0)
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert not matmul.gains_from_bfloat16(shapes)
