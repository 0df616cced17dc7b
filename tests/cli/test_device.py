"""The device of a command, where torch was built for GPUs and none can be used."""

import torch

from tarnn.cli.generate import pick_device
from tarnn.cli.machine import accelerator


def test_auto_is_the_cpu_where_the_gpu_of_torchs_build_is_absent(monkeypatch):
    built = torch.device("cuda")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: None if check_available else built
    )
    assert torch.accelerator.current_accelerator() == built
    assert pick_device("auto") == torch.device("cpu")
    assert accelerator() is None
