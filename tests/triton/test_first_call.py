"""A first call whose kernels don't compile: Triton is left as it was, and the error comes with the launch."""

import pytest
import torch

pytest.importorskip("triton")
import gpu_compiler
import gpu_resources
from triton import compiler
from triton.runtime import _async_compile
from triton.runtime.driver import driver
from triton.runtime.errors import PTXASError

from tarnn.kernels.triton import first_call, launch, machine
from tarnn.kernels.triton.kinds import LaunchError

pytestmark = pytest.mark.skipif(gpu_compiler.INTERPRETED, reason="kernels are interpreted here")


class Broken(gpu_compiler._AbsentGPU):
    """A GPU that Triton hasn't met, so that it knows of no compiled kernel."""

    def get_current_device(self) -> str:
        return "broken"


@pytest.fixture
def call(monkeypatch):
    monkeypatch.setattr(machine, "interpreted", True)
    monkeypatch.setattr(first_call, "_met", set())
    before = driver._active
    driver.set_active(Broken(gpu_compiler.target_of(90)))
    yield gpu_resources.call_of("plain", "bfloat16", 64)
    driver.set_active(before)


def test_a_kernel_that_does_not_compile(call, monkeypatch):
    def fail(*_, **__):
        raise PTXASError("ptxas fatal : Unsupported .version")

    monkeypatch.setattr(compiler, "compile", fail)
    first_call.compile_forward(call)
    assert _async_compile.active_mode.get() is None
    with pytest.raises(LaunchError, match="Unsupported"):
        launch.forward(call, True)


def test_a_driver_that_is_not_found(call, monkeypatch):
    def fail(*_):
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(Broken, "get_current_target", fail)
    with pytest.raises(LaunchError, match="libcuda"):
        first_call.compile_backward(call)
    assert _async_compile.active_mode.get() is None


def test_rows_whose_stride_is_odd_are_met(call):
    """One row would have no stride at all, and its kernels would be others."""
    x = torch.empty(2, 2, 300, 67, dtype=torch.bfloat16)[..., :64]
    odd = call._replace(q=x[:, :, :299], k=x[:, :, :299], v=x[:, :, :299])
    names = lambda found: {x.identity for x in found}  # noqa: E731
    first = names(gpu_compiler.launched(lambda: first_call.compile_forward(odd), 90))
    assert names(gpu_compiler.launched(lambda: launch.forward(odd, True), 90)) <= first
