"""Float32 products by oneDNN: only on processors where they stay float32, and torch is afterwards as before."""

import json
from contextlib import suppress

import pytest
import torch

import tarnn
from tarnn import matmul
from tarnn.matmul import FAST, HIGHEST, LEAST, fast_matmul, product_size, refusal
from tarnn.training.safe_trainer import SafeTrainer


def now() -> str:
    return torch.get_float32_matmul_precision()


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv(matmul.VARIABLE, raising=False)
    torch.set_float32_matmul_precision(HIGHEST)
    yield
    torch.set_float32_matmul_precision(HIGHEST)


@pytest.fixture
def gains(monkeypatch):
    """A processor with AVX-512 and without AMX, and no accelerator."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def test_products_here_keep_the_error_of_float32():
    a, b = torch.randn(1024, 128), torch.randn(128, 192)
    exact, errors = a.double() @ b.double(), []
    errors.append((a @ b - exact).norm())
    with fast_matmul():
        errors.append((a @ b - exact).norm())
    assert errors[1] <= 4 * errors[0]


@pytest.mark.usefixtures("gains")
def test_as_a_call_and_as_a_context():
    with suppress(KeyError), tarnn.fast_matmul() as outer:
        assert (now(), outer.why) == (FAST, "oneDNN in float32")
        with fast_matmul() as inner:
            assert inner.why == "as set in torch before"
        assert now() == FAST
        raise KeyError
    assert now() == HIGHEST
    called = fast_matmul()
    assert now() == FAST
    with called:
        pass
    assert now() == HIGHEST


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize(
    ("place", "name", "value", "why"),
    [
        (torch.backends.cpu, "get_cpu_capability", "AVX2", "on this processor"),
        (torch.cpu, "_is_amx_tile_supported", True, "on this processor"),
        (torch.backends.mkldnn, "is_available", False, "on this processor"),
        (torch.accelerator, "is_available", True, "accelerator"),
        (torch, "get_float32_matmul_precision", "high", "as set in torch"),
    ],
)
def test_where_nothing_changes(monkeypatch, place, name, value, why):
    assert refusal() == ""
    monkeypatch.setattr(place, name, lambda: value)
    changed = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", changed.append)
    with fast_matmul() as products:
        assert why in products.why
    assert changed == []


@pytest.mark.usefixtures("gains")
def test_sizes_the_variable_and_torchs_other_switches(monkeypatch):
    assert "small" in refusal(LEAST - 1)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: exec("raise RuntimeError"))
    assert refusal() == "as set in torch before"
    monkeypatch.setenv(matmul.VARIABLE, "off")
    assert "TARNN_FAST_MATMUL=off" in refusal()
    monkeypatch.setenv(matmul.VARIABLE, "fast")
    with pytest.raises(ValueError, match="TARNN_FAST_MATMUL=fast is not known; expected on or off"):
        fast_matmul()


def test_the_typical_product_of_a_model():
    model = torch.nn.Sequential(torch.nn.Embedding(11, 3), torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    model.append(torch.nn.Linear(5, 7)).append(torch.nn.Linear(3, 5))
    assert product_size(model, 2) == 2 * (3 * 5 + 5 * 7) / 2
    assert product_size(torch.nn.Embedding(11, 3), 2) == 0


@pytest.mark.usefixtures("gains")
def test_commands_use_it_and_say_so(command, train, tmp_path, monkeypatch):
    seen, compute_loss = set(), SafeTrainer.compute_loss
    monkeypatch.setattr("tarnn.matmul.LEAST", 0)
    monkeypatch.setattr(SafeTrainer, "compute_loss", lambda *args, **kw: seen.add(now()) or compute_loss(*args, **kw))
    code, _, stderr = train("--steps", 4, "--sample-tokens", 0)
    assert (code, seen, now()) == (0, {FAST}, HIGHEST)
    assert "products  oneDNN in float32\n" in stderr
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["run"]["products"] == "oneDNN in float32"
    assert "tarnn: products of the fused step (float32 weights)\n" in command("eval", tmp_path / "run").err
    assert json.loads(command("info", "--json").out)["products"] == "oneDNN in float32"
    monkeypatch.setenv(matmul.VARIABLE, "perhaps")
    assert command("info").is_refusal("TARNN_FAST_MATMUL=perhaps", "expected on or off")


def test_a_run_that_recorded_its_products_goes_on(train, tmp_path):
    assert train("--steps", 4, "--sample-tokens", 0)[0] == 0
    marker = tmp_path / "run" / "checkpoints" / "checkpoint-4" / "complete.json"
    content = json.loads(marker.read_text())
    assert "matmul_precision" not in content
    marker.write_text(json.dumps(content | {"matmul_precision": FAST}))
    assert train("--steps", 8, "--resume", "--sample-tokens", 0)[0] == 0
