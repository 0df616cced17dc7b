"""The kernels of a first call: when they are compiled, and what happens if they aren't."""

import threading

import pytest
import torch

pytest.importorskip("triton")
import gpu_resources
import triton
from toolkit import gpu_compiler
from triton import compiler
from triton.runtime import _async_compile
from triton.runtime.driver import driver
from triton.runtime.errors import PTXASError

from tarnn.kernels.linear import Call
from tarnn.kernels.triton import backward_kernels, device, forward_kernels, launch, precompile
from tarnn.kernels.triton.launch_failures import LaunchError

pytestmark = pytest.mark.skipif(gpu_compiler.INTERPRETED, reason="kernels are interpreted here")
FORWARD = {"state_sums", "prefix", "outputs"}
BACKWARD = {"gradient_rows", "gradient_sums", "query_gradients", "key_gradients", "value_gradients"}


class Unmet(gpu_compiler._AbsentGPU):
    """A GPU that Triton hasn't met, so that it knows of no compiled kernel."""

    def get_current_device(self) -> str:
        return f"unmet {id(self)}"


@pytest.fixture
def compiled_by(monkeypatch):
    """A function that puts another in the place of Triton's compiler, and gives a call."""
    before = driver._active

    def put(function) -> Call:
        monkeypatch.setattr(device, "interpreted", True)
        monkeypatch.setattr(precompile, "_met", set())
        monkeypatch.setattr(compiler, "compile", function)
        driver.set_active(Unmet(gpu_compiler.target_of(90)))
        return gpu_resources.call_of("plain", "bfloat16", 64)

    yield put
    driver.set_active(before)
    for module in (forward_kernels, backward_kernels):  # kernels keep the compiler that they met
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.compile = triton.compile


def test_a_kernel_that_does_not_compile(compiled_by):
    def fail(*_, **__):
        raise PTXASError("ptxas fatal : Unsupported .version")

    call = compiled_by(fail)
    precompile.compile_forward(call, True)
    assert _async_compile.active_mode.get() is None
    with pytest.raises(LaunchError, match="Unsupported"):
        launch.forward(call, True)


def test_a_driver_that_is_not_found(compiled_by, monkeypatch):
    def fail(*_):
        raise AssertionError("libcuda.so cannot found!")

    call = compiled_by(None)
    monkeypatch.setattr(Unmet, "get_current_target", fail)
    with pytest.raises(LaunchError, match="libcuda"):
        precompile.compile_backward(call)
    assert _async_compile.active_mode.get() is None


@pytest.mark.parametrize("for_backward", [False, True])
def test_backward_kernels_are_compiled_behind_the_forward_ones_and_nobody_waits(compiled_by, for_backward):
    begun, go_on = [], threading.Event()

    def compiled(source, **_):
        begun.append(source.fn.__name__)
        assert go_on.wait(60)

    call = compiled_by(compiled)
    precompile.compile_forward(call, for_backward)
    go_on.set()
    # what comes behind all of them
    pool = precompile.threads()
    all_of_them = threading.Barrier(pool._max_workers)
    list(pool.map(lambda _: all_of_them.wait(), range(pool._max_workers)))
    assert set(begun[:3]) == FORWARD
    assert set(begun) - FORWARD == (BACKWARD if for_backward else set())


def test_rows_whose_stride_is_odd_are_met(monkeypatch):
    """One row would have no stride at all, and its kernels would be others."""
    monkeypatch.setattr(precompile, "_met", set())
    call = gpu_resources.call_of("plain", "bfloat16", 64)
    x = torch.empty(2, 2, 300, 67, dtype=torch.bfloat16)[..., :64]
    odd = call._replace(q=x[:, :, :299], k=x[:, :, :299], v=x[:, :, :299])
    names = lambda found: {x.identity for x in found}  # noqa: E731
    first = names(gpu_compiler.launched(lambda: precompile.compile_forward(odd, False), 90))
    assert names(gpu_compiler.launched(lambda: launch.forward(odd, True), 90)) <= first
