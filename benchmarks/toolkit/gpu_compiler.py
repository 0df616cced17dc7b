"""Triton's kernels for a GPU that isn't there: which ones a call launches, compiled, and what their machine code needs.

No driver is touched and nothing is run: the call's tensors are on the CPU, and each launch is only written down.
"""

import ast
import contextlib
import functools
import hashlib
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tarnn.kernels.triton import device, launch
from tarnn.kernels.triton.configurations import SHARED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then there is nothing to compile
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TENSOR_CORE = {0x3C, 0x1F0, 0x1EA}  # opcodes of HMMA, HGMMA, UTCHMMA; tests/triton/test_compiles.py asks nvdisasm
FLOAT32 = (triton.language.float32, "ieee")  # AMD's matrix cores multiply float32 themselves
FFMA = {0x23, 0x49}  # FFMA, FFMA2


class Resources(NamedTuple):
    """Of one kernel: per thread registers and bytes of stack (spilled registers), per block bytes of shared memory, and how
    many instructions of a kind stand in the machine code."""

    registers: int
    stack: int
    shared: int
    tensor_core: int  # HMMA, HGMMA, QGMMA, UTCHMMA: products on tensor cores
    ffma: int  # products of single numbers
    instructions: int
    products: bool  # whether the kernel multiplies tiles at all


@functools.cache
def code_of(function: JITFunction) -> str:
    """A kernel's source and that of all that it calls, without comments, docstrings and the places where they stand."""
    tree = ast.parse(function.src)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    used = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    functions = [code_of(x) for _, x in used if isinstance(x, JITFunction)]
    numbers = [f"{name} = {x.value}" for name, x in used if isinstance(x, triton.language.constexpr)]
    return "\n".join([ast.unparse(tree), *functions, *numbers])


class Specialised(NamedTuple):
    """A kernel as a launch wants it: what a call compiles the first time, and finds compiled afterwards."""

    name: str
    source: Any
    target: GPUTarget
    options: dict[str, Any]

    @property
    def constants(self) -> dict[str, Any]:
        """By name."""
        names = self.source.fn.arg_names
        return {names[place[0]]: x for place, x in self.source.constants.items() if len(place) == 1}

    @property
    def identity(self) -> str:
        """Of all that its machine code depends on."""
        options = {name: x for name, x in self.options.items() if name != "extern_libs"}  # paths of this machine
        source = (
            code_of(self.source.fn),
            sorted(self.source.signature.items()),
            sorted(self.constants.items(), key=str),
        )
        given = (source, str(self.source.attrs), self.target, sorted(options.items(), key=str), triton.__version__)
        return hashlib.sha256(repr(given).encode()).hexdigest()[:16]

    def compiled(self) -> Any:
        """Compiled anew, whatever Triton has in its cache."""
        with triton.knobs.compilation.scope(), active(self.target):
            triton.knobs.compilation.always_compile = True
            return triton.compile(self.source, target=self.target, options=self.options)


class _AbsentGPU:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # Triton keeps what is compiled by device

    def get_current_stream(self, device: str) -> int:
        return 0


@contextlib.contextmanager
def active(target: GPUTarget) -> Iterator[None]:
    """In here, that GPU is the one that there is."""
    before = driver._active
    driver.set_active(_AbsentGPU(target))  # type: ignore[arg-type]
    try:
        yield
    finally:
        driver._active = before


def target_of(gpu: int | str) -> GPUTarget:
    """90, or one by AMD: "gfx942"."""
    return GPUTarget("hip", gpu, 64) if isinstance(gpu, str) else GPUTarget("cuda", gpu, 32)


@contextlib.contextmanager
def absent_gpu(gpu: int | str, *, processors: int):
    """In here, kernels that are launched are appended to the list that this gives, once each. Tensors are on the CPU."""
    found: dict[Any, Specialised] = {}

    def write_down(kernel, key, signature, device, constants, options, attributes, warmup) -> None:
        name = kernel.fn.__name__
        made = lambda: ASTSource(kernel, signature, constants, attributes)  # noqa: E731
        found.setdefault((name, str(key)), Specialised(name, made(), target_of(gpu), dict(options.__dict__)))

    launches: list[Specialised] = []
    products = dict.fromkeys(launch.PRODUCTS, FLOAT32) | {torch.bfloat16: launch.PRODUCTS[torch.bfloat16]}
    try:
        with (
            active(target_of(gpu)),
            mock.patch.object(JITFunction, "_do_compile", write_down),
            mock.patch.object(device, "interpreted", True),
            mock.patch.object(launch, "processors", return_value=processors),
            mock.patch.object(launch, "shared_memory", return_value=SHARED.get(gpu, 64)),
            mock.patch.object(launch, "PRODUCTS", products if isinstance(gpu, str) else launch.PRODUCTS),
        ):
            yield launches
    finally:
        launches.extend(found.values())


def launched(call: Callable[[], object], gpu: int | str, *, processors: int = 1) -> list[Specialised]:
    """The kernels that this launches, on a GPU that runs so many programs at once."""
    with absent_gpu(gpu, processors=processors) as found:
        call()
    return found


def resources(binary: Any) -> Resources:
    """What cuobjdump, which comes with Triton, and the machine code say of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
    number = lambda key: int(re.search(key + r":(\d+)", usage).group(1))  # type: ignore[union-attr]  # noqa: E731
    codes = opcodes(binary.asm["cubin"])
    count = lambda kinds: sum(code in kinds for code in codes)  # noqa: E731
    return Resources(
        number("REG"),
        number("STACK"),
        binary.metadata.shared,
        count(TENSOR_CORE),
        count(FFMA),
        len(codes),
        "tt.dot" in binary.asm["ttir"],
    )


def opcodes(cubin: bytes) -> list[int]:
    """Of all instructions: the lowest 9 of 128 bits, without the kinds of operands. nvdisasm, which knows their names, takes
    longer to start than many kernels take to compile."""
    at, size, number, names = struct.unpack_from("<Q10xHHH", cubin, 0x28)  # section headers
    headers = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(number)]
    name_of = lambda header: cubin[headers[names][4] + header[0] :].partition(b"\0")[0]  # noqa: E731
    code = b"".join(cubin[x[4] : x[4] + x[5]] for x in headers if name_of(x).startswith(b".text."))
    return [code[i] | (code[i + 1] & 1) << 8 for i in range(0, len(code), 16)]


def amd_resources(binary: Any) -> Resources:
    """The same of a GPU by AMD, from the assembler's own notes."""
    code = binary.asm["amdgcn"]
    number = lambda key: int(re.search(key + r":?\s+(\d+)", code).group(1))  # type: ignore[union-attr]  # noqa: E731
    count = lambda pattern: len(re.findall(pattern, code))  # noqa: E731
    return Resources(
        number("NumVgprs"),
        number("ScratchSize"),
        binary.metadata.shared,
        count(r"\bv_mfma"),
        count(r"\bv_(?:pk_)?fma"),
        count(r"\n\t[sv]_|\n\t(?:ds|buffer|global)_"),
        "tt.dot" in binary.asm["ttir"],
    )


def _output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
