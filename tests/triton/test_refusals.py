"""What the kernels for GPUs don't compute, plain PyTorch does: a reason, and a warning once where it can be mended."""

from types import SimpleNamespace

import pytest
import torch

from tarnn.cli import machine as cli_machine
from tarnn.kernels.contract import Mendable
from tarnn.kernels.linear import Call
from tarnn.kernels.triton import device, linear as triton, schedule
from tarnn.kernels.triton.arguments import Rows


@pytest.fixture
def a_gpu(monkeypatch):
    """A function that makes status believe in a GPU of some capability, and in a version of Triton."""

    def believe(capability=(9, 0), triton_version="3.7.1", hip=None):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(device, "triton_version", lambda: triton_version)
        monkeypatch.setattr(torch.version, "hip", hip)
        device.status.cache_clear()
        return device.refusal(torch.device("cuda", 0))

    yield believe
    device.status.cache_clear()


def test_a_gpu_with_all_that_is_needed(a_gpu, monkeypatch):
    monkeypatch.delenv("TARNN_KERNELS", raising=False)
    device.warn_experimental.cache_clear()
    with pytest.warns(UserWarning, match="experimental: on an H100 not all laws of precision held.*TARNN_KERNELS=off"):
        why = a_gpu(triton_version="3.6.0")
    assert why is None
    assert a_gpu() is None  # and no second warning
    path, why = device.status(0)
    assert path == "Triton 3.7.1, sm_90"
    assert why.startswith("experimental")
    monkeypatch.setenv("TARNN_KERNELS", "off")
    assert "switched off" in a_gpu()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({"capability": (7, 5)}, "8.0 (Ampere) or newer; this one is sm_75"),
        ({"triton_version": None}, 'not installed: install them by `pip install "tarnn[triton]"`'),
        ({"triton_version": "3.8.0"}, "tested with Triton 3.6 and 3.7, and this is 3.8.0"),
        ({"hip": "6.4"}, "AMD"),
    ],
)
def test_what_can_be_mended_is_worth_a_warning(a_gpu, monkeypatch, words, part):
    monkeypatch.delenv("TARNN_KERNELS", raising=False)
    why = a_gpu(**words)
    assert isinstance(why, Mendable)
    assert part in why
    assert why.startswith("Attention on the GPU runs in plain PyTorch")


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(device, "interpreted", True)


def refusal(**words) -> str | None:
    sizes = {"b": 1, "h": 2, "t": 5, "d": 8, "e": 8, "dtype": torch.float32} | words
    a = SimpleNamespace(**sizes)
    q, v = (torch.zeros(a.b, a.h, a.t, width, dtype=a.dtype) for width in (a.d, a.e))
    return triton.refusal(Call(q, q, v, function="elu"))


def test_calls_that_they_take_and_calls_that_they_do_not(anywhere):
    assert refusal() is None
    assert refusal(d=256, e=256, t=0) is None
    wide = refusal(d=257)
    assert isinstance(wide, Mendable)
    assert "at most 256" in wide
    assert "float64" in refusal(dtype=torch.float64)
    assert "nothing" in refusal(e=0)
    far = torch.empty_strided((1, 1, 2, 8), (0, 0, 2**25, 1))
    assert "apart" in triton.refusal(Call(far, far, far))
    near = Rows.read(far).data  # gradients come as they come: they are copied
    assert near.stride(2) == 8
    assert Rows.read(near).data is near


def test_tables_that_a_cuda_graph_reads_are_kept(monkeypatch):
    """Others leave the cache after 64 more; a graph would read memory that is no longer theirs."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(schedule, "_RECORDED", {})
    before = schedule.of_rows(1, 7, 64, 64, cpu)
    monkeypatch.setattr(schedule, "_recording", lambda: True)
    recorded = schedule.of_rows(1, 7, 64, 64, cpu)
    assert recorded is before  # nothing is made while a graph is recorded
    monkeypatch.setattr(schedule, "_recording", lambda: False)
    for length in range(100, 200):
        schedule.of_rows(1, length, 64, 64, cpu)
    assert schedule.of_rows(1, 7, 64, 64, cpu) is recorded
    assert list(schedule._RECORDED.values()) == [recorded]


def test_info_says_which_kernels_run_on_the_gpu_and_why(a_gpu, monkeypatch):
    monkeypatch.delenv("TARNN_KERNELS", raising=False)
    a_gpu(capability=(7, 0))
    monkeypatch.setattr(cli_machine, "accelerator", lambda: "a GPU")
    assert "GPU kernel" not in cli_machine.machine_text(cli_machine.machine_facts())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    facts = cli_machine.machine_facts()
    assert facts["gpu_kernel"]["path"] == "PyTorch"
    assert "sm_70" in cli_machine.machine_text(facts)
