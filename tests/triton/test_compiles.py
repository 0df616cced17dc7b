"""The gate of `benchmarks/gpu_resources.py`: kernels compile for GPUs that aren't there, and what the gate finds wrong."""

import pytest

pytest.importorskip("triton")
import gpu_resources
from gpu_compiler import Resources

pytestmark = pytest.mark.skipif(gpu_resources.gpu_compiler.INTERPRETED, reason="kernels are interpreted here")


def test_a_kernel_compiles_for_a_gpu_that_is_not_there():
    """bfloat16, heads of 64, Hopper: on tensor cores, in the memory that there is, with no product of single numbers."""
    found = gpu_resources.compile_one("state_sums", "plain", "bfloat16", 64, 90)
    assert not found.wrong
    assert found.tensor_core > 0
    assert 0 < found.registers <= 255


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ({}, ""),
        ({"shared": 233_000}, "shared memory"),
        ({"stack": 2000}, "2000 bytes spilled"),
        ({"tensor_core": 0}, "no tensor cores"),
        ({"ffma": 400}, "400 FFMA"),
    ],
)
def test_what_the_gate_lets_through(words, part):
    right = {
        "registers": 200,
        "stack": 0,
        "shared": 50_000,
        "tensor_core": 16,
        "ffma": 20,
        "instructions": 2000,
    }
    found = gpu_resources.wrong(Resources(**right | words), 90)
    assert part in found
    assert bool(found) == bool(part)


def test_every_kernel_has_a_type_for_each_argument():
    for name, module in gpu_resources.KERNELS.items():
        kernel = getattr(module, name)
        types = {x: gpu_resources.type_of(x, kernel, "bfloat16") for x in kernel.arg_names}
        assert types["items"] == "*i32"
        assert types.get("S", "*fp32") == types.get("S_in", "*fp32") == "*fp32"
        assert all(types[x] == "i32" for x in ("T", "G"))
