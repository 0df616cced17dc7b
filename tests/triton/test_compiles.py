"""What calls compile, for GPUs that aren't there: the gate of `benchmarks/gpu_resources.py`, and the first call."""

import pytest
import torch

pytest.importorskip("triton")
import gpu_compiler
import gpu_resources
from gpu_compiler import Resources

from tarnn import linear_attention
from tarnn.kernels.triton import first_call

pytestmark = pytest.mark.skipif(gpu_compiler.INTERPRETED, reason="kernels are interpreted here")
FORWARD = {"state_sums", "prefix", "outputs"}
BACKWARD = {"gradient_rows", "gradient_sums", "query_gradients", "key_gradients", "value_gradients"}


def test_a_kernel_compiles_for_a_gpu_that_is_not_there():
    """bfloat16, heads of 64, Hopper: on tensor cores, in the memory that there is, with no product of single numbers."""
    cell = "plain", "bfloat16", 64, "sm_90"
    found = gpu_resources.compile_one(gpu_resources.kernels_of(*cell)[0], *cell)
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
        "products": True,
    }
    found = gpu_resources.wrong(Resources(**right | words), "sm_90")
    assert part in found
    assert bool(found) == bool(part)


def attend(t=256, *, b=1, h=2, layout="bthd", differentiated=True, **options) -> None:
    """A call of any size; options by the axes of their tensors."""
    sizes = {"b": b, "h": h, "t": t, "d": 64}
    q, k, v = (
        torch.empty([sizes[x] for x in layout], dtype=torch.bfloat16).requires_grad_(differentiated)
        for _ in range(3)
    )
    q, k, v = (x.transpose(1, 2) if layout == "bthd" else x for x in (q, k, v))
    given = {name: torch.empty([sizes[x] for x in axes]) for name, axes in options.items()}
    if "key_mask" in given:
        given["key_mask"] = torch.ones(b, t, dtype=torch.bool)
    o = linear_attention(q, k, v, causal=True, **given)
    if differentiated:
        torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize(
    "options",
    [{}, {"key_mask": "bt", "log_decay": "bht", "key_log_weight": "bht"}, {"log_decay": "bhtd"}],
    ids=str,
)
def test_sizes_are_no_part_of_what_is_compiled(options):
    """One row and many, short and long, cut or not, with a backward pass or without, however they lie in memory."""
    launched = lambda processors, **words: {  # noqa: E731
        x.identity: x.name
        for x in gpu_compiler.launched(lambda: attend(**options | words), 90, processors=processors)
    }
    every = launched(132)
    if not options:
        assert sorted(every.values()) == sorted(FORWARD | BACKWARD)
    for words in (
        {"t": 17},
        {"t": 1000, "b": 3},
        {"t": 333, "h": 5, "layout": "bhtd"},
        {"differentiated": False},
    ):
        for processors in (1, 132):
            assert launched(processors, **words).keys() <= every.keys()


@pytest.mark.parametrize("function", ["elu", "exp"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_first_call_compiles_all_that_later_calls_launch(causal, function, monkeypatch):
    monkeypatch.setattr(first_call, "_met", set())
    call = gpu_resources.call_of("masked, grouped", "bfloat16", 64)._replace(causal=causal, function=function)
    names = lambda found: {x.identity: x.name for x in found}  # noqa: E731
    compiled = lambda: first_call.compile_forward(call, True)  # noqa: E731
    first = names(gpu_compiler.launched(compiled, 90))
    assert first
    for processors in (1, 132):
        later = names(
            gpu_compiler.launched(lambda: gpu_resources.whole_call(call), 90, processors=processors)
        )
        assert {x: name for x, name in later.items() if x not in first} == {}
    assert not gpu_compiler.launched(compiled, 90)
