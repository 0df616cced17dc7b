"""What flash-linear-attention doesn't compute, plain PyTorch does: a reason, and a warning once where the user can mend it."""

import subprocess
import sys

import pytest
import torch

from tarnn.cli import machine
from tarnn.kernels.contract import FixableRefusal, reasons
from tarnn.kernels.delta import Call as DeltaCall
from tarnn.kernels.fla import availability
from tarnn.kernels.linear import Call

THERE = "flash-linear-attention 0.6.0, sm_90"


@pytest.fixture
def a_gpu(monkeypatch):
    """A function that returns the status of a GPU of some capability, with some version of the package."""
    monkeypatch.delenv("TARNN_KERNELS", raising=False)

    def status(capability=(9, 0), version="0.6.0", hip=None, triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(availability, "fla_version", lambda: version)
        monkeypatch.setattr(availability, "find_spec", lambda name: triton or None)
        monkeypatch.setattr(torch.version, "hip", hip)
        availability.status.cache_clear()
        return availability.status(0)

    yield status
    availability.status.cache_clear()


@pytest.fixture
def on_the_gpu(monkeypatch):
    """Tensors count as tensors of a GPU."""
    monkeypatch.setattr(availability, "is_elsewhere", lambda x: False)


def test_a_gpu_with_all_that_is_needed(a_gpu, on_the_gpu, monkeypatch):
    assert a_gpu().path == THERE
    assert reasons("linear", call()) == {"fla": None}
    assert reasons("delta", delta_call()) == {"fla": None}
    monkeypatch.setenv("TARNN_KERNELS", "off")
    assert "switched off" in a_gpu().why
    assert not isinstance(availability.refusal(call().q, call().v, 8), FixableRefusal)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({"capability": (7, 5)}, "8.0 (Ampere) or newer; this one is sm_75"),
        ({"version": None}, "flash-linear-attention is not installed: pip install 'tarnn[gpu]'"),
        ({"triton": False}, "Triton is not installed"),
        ({"version": "0.7.1"}, "calls flash-linear-attention 0.6, and this is 0.7.1"),
        ({"hip": "6.4"}, "AMD"),
    ],
)
def test_what_can_be_mended_is_worth_a_warning(a_gpu, on_the_gpu, words, part):
    assert a_gpu(**words).path == "PyTorch"
    why = reasons("linear", call())["fla"]
    assert isinstance(why, FixableRefusal)
    assert part in why
    assert why.startswith("On this GPU plain PyTorch computes")
    # nobody has to mend that
    assert not isinstance(reasons("linear", call(dtype=torch.float32))["fla"], FixableRefusal)


def call(t=5, d=8, dtype=torch.bfloat16, **fields) -> Call:
    q = torch.zeros(1, 2, t, d, dtype=dtype)
    return Call(q, q, q)._replace(**{"function": "elu"} | fields)


def delta_call(h=2, d=8, dtype=torch.bfloat16) -> DeltaCall:
    q, k = torch.zeros(1, h, 5, d, dtype=dtype), torch.zeros(1, 2, 5, d, dtype=dtype)
    return DeltaCall(q, k, k, torch.zeros(1, 2, 5))


@pytest.mark.parametrize(
    ("op", "refused", "part"),
    [
        ("linear", call(dtype=torch.float32), "multiplies float32 as tf32"),
        ("linear", call(dtype=torch.float16), "float16"),
        ("linear", call(causal=False), "causal"),
        ("linear", call(function="exp"), "running maximum"),
        ("linear", call(key_log_weight=torch.zeros(1, 2, 5)), "running maximum"),
        ("linear", call(d=257), "at most 256 channels"),
        ("linear", call(t=0), "nothing"),
        ("delta", delta_call(dtype=torch.float32), "multiplies float32 as tf32"),
        ("delta", delta_call(h=4), "share one"),
        ("delta", delta_call(d=257), "at most 256 channels"),
    ],
)
def test_other_calls_are_for_plain_pytorch(a_gpu, on_the_gpu, op, refused, part):
    a_gpu()
    answers = reasons(op, refused)
    assert part in answers["fla"]
    assert not isinstance(answers["fla"], FixableRefusal)
    assert list(answers.values())[-1] is None


def test_tensors_on_a_cpu_are_refused_and_nothing_is_imported():
    assert "elsewhere" in reasons("linear", call())["fla"]
    assert "elsewhere" in reasons("delta", delta_call())["fla"]
    code = (
        "import sys, torch, tarnn; q = torch.ones(1, 1, 2, 4, dtype=torch.bfloat16); "
        "tarnn.linear_attention(q, q, q, causal=True); assert not {'fla', 'triton'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_info_says_what_computes_on_the_gpu_and_why(a_gpu, monkeypatch):
    a_gpu(version=None)
    monkeypatch.setattr(machine, "accelerator", lambda: "a GPU")
    assert "GPU kernel" not in machine.machine_text(machine.machine_facts())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "GPU kernels" in machine.machine_text(machine.machine_facts())
    assert machine.machine_facts()["gpu_kernel"]["path"] == "PyTorch"
    a_gpu()
    text = machine.machine_text(machine.machine_facts())
    assert f"{THERE}: in bfloat16; other types take plain PyTorch (for delta, linear)" in text
