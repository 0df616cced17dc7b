"""What calls compile, for GPUs that aren't there: the gate of `benchmarks/gpu_resources.py`, and the first call."""

import re
import subprocess
import tempfile
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
import gpu_resources
from toolkit import gpu_compiler
from toolkit.gpu_compiler import Resources

from tarnn import linear_attention
from tarnn.kernels.triton import forward_kernels, launch, precompile

pytestmark = pytest.mark.skipif(gpu_compiler.INTERPRETED, reason="kernels are interpreted here")
FORWARD = {"state_sums", "prefix", "outputs"}
BACKWARD = {"gradient_rows", "gradient_sums", "query_gradients", "key_gradients", "value_gradients"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "cell"),
    [
        ("state_sums", ("plain", "bfloat16", 64, "sm_90")),
        ("outputs", ("random features", "bfloat16", 128, "sm_90")),
        ("value_gradients", ("plain", "float32", 256, "sm_80")),
        ("decay_gradients", ("decay a token", "float32", 128, "sm_89")),
        ("outputs", ("random features", "float32", 64, "gfx942")),
    ],
    ids=str,
)
def test_a_kernel_compiles_for_a_gpu_that_is_not_there(kernel, cell):
    """On tensor cores, in the memory that there is, with no product of single numbers, within the budget of spills."""
    found = gpu_resources.compile_one(next(x for x in gpu_resources.kernels_of(*cell) if x.name == kernel), *cell)
    assert not found.wrong
    assert found.tensor_core > 0
    assert 0 < found.registers <= 256


def test_a_kernel_that_wants_too_much_tensor_memory_is_seen(monkeypatch):
    """Triton compiles it without a word, to one instruction that stops."""
    monkeypatch.setattr(launch, "ROWS", 128)
    cell = "random features", "bfloat16", 256, "sm_100"
    kernel = next(x for x in gpu_resources.kernels_of(*cell) if x.name == "row_scales")
    assert gpu_resources.compile_one(kernel, *cell).wrong == "544 columns of tensor memory, of 512"


def test_a_row_outside_of_the_gate_is_seen(monkeypatch):
    cell = "plain", "bfloat16", 64, "sm_90"
    kernel = next(x for x in gpu_resources.kernels_of(*cell) if x.name == "state_sums")
    row = replace(gpu_resources.compile_one(kernel, *cell), calls=["plain, bfloat16, 64"], wrong="2000 bytes spilled")
    assert gpu_resources.expected(row) is None
    monkeypatch.setitem(gpu_resources.EXPECTED, (row.kernel, row.calls[-1], row.gpu), "as an example")
    assert gpu_resources.expected(row) == "as an example"


@pytest.mark.parametrize("gpu", ["sm_90", "sm_100"])
def test_instructions_are_counted_as_the_disassembler_does(gpu):
    cell = "plain", "bfloat16", 64, gpu
    kernel = next(x for x in gpu_resources.kernels_of(*cell) if x.name == "gradient_sums")
    binary = kernel.compiled()
    found = gpu_compiler.resources(binary)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [gpu_compiler.TOOLS / "nvdisasm", "-c", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    count = lambda pattern: len(re.findall(pattern, code))  # noqa: E731
    expected = (count(r"\b(?:HMMA|HGMMA|UTC[A-Z]*MMA)\b"), count(r"\bFFMA2?\b"), count(r"\n\s+/\*[0-9a-f]{4,}\*/"))
    assert (found.tensor_core, found.ffma, found.instructions) == expected
    assert min(expected) > 0


def test_what_is_written_about_a_kernel_is_no_part_of_it():
    """Docstrings, comments and where a kernel stands; but all that it calls."""
    code = gpu_compiler.code_of(forward_kernels.state_sums)
    assert "an item's own keys" not in code
    assert "def load_rows(" in code
    assert "LOG2E = 1.44" in code


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
        torch.empty([sizes[x] for x in layout], dtype=torch.bfloat16).requires_grad_(differentiated) for _ in range(3)
    )
    q, k, v = (x.transpose(1, 2) if layout == "bthd" else x for x in (q, k, v))
    given = {name: torch.empty([sizes[x] for x in axes]) for name, axes in options.items()}
    if "key_mask" in given:
        given["key_mask"] = torch.ones(b, t, dtype=torch.bool)
    o = linear_attention(q, k, v, causal=True, **given)
    if differentiated:
        torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize(
    "options", [{}, {"key_mask": "bt", "log_decay": "bht", "key_log_weight": "bht"}, {"log_decay": "bhtd"}], ids=str
)
def test_sizes_are_no_part_of_what_is_compiled(options):
    """One row and many, short and long, cut or not, with a backward pass or without, however they lie in memory."""
    launched = lambda processors, **words: {  # noqa: E731
        x.identity: x.name for x in gpu_compiler.launched(lambda: attend(**options | words), 90, processors=processors)
    }
    every = launched(132)
    if not options:
        assert sorted(every.values()) == sorted(FORWARD | BACKWARD)
    for words in ({"t": 17}, {"t": 1000, "b": 3}, {"t": 333, "h": 5, "layout": "bhtd"}, {"differentiated": False}):
        for processors in (1, 132):
            assert launched(processors, **words).keys() <= every.keys()


@pytest.mark.parametrize("function", ["elu", "exp"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_first_call_compiles_all_that_later_calls_launch(causal, function, monkeypatch):
    monkeypatch.setattr(precompile, "_met", set())
    call = gpu_resources.call_of("plain", "bfloat16", 64)
    k, v, key_mask = call.k[:, :1], call.v[:, :1], torch.ones(1, 256, dtype=torch.bool)
    call = call._replace(k=k, v=v, key_mask=key_mask, causal=causal, function=function)
    names = lambda found: {x.identity: x.name for x in found}  # noqa: E731
    compiled = lambda: precompile.compile_forward(call, True)  # noqa: E731
    first = names(gpu_compiler.launched(compiled, 90))
    assert first
    for processors in (1, 132):
        later = names(gpu_compiler.launched(lambda: gpu_resources.whole_call(call), 90, processors=processors))
        assert {x: name for x, name in later.items() if x not in first and name != "one_token"} == {}
    assert not gpu_compiler.launched(compiled, 90)
