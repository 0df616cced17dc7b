"""Triton's kernels compiled for a GPU that isn't there, and what the machine code needs: no driver is touched."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then there is nothing to compile
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Resources(NamedTuple):
    """Of one kernel: per thread registers and bytes of stack (spilled registers), per block bytes of shared memory, and how
    many instructions of a kind stand in the machine code."""

    registers: int
    stack: int
    shared: int
    tensor_core: int  # HMMA, HGMMA, QGMMA, UTCHMMA: products on tensor cores
    ffma: int  # products of single numbers
    instructions: int


def compiled(kernel, types: dict[str, str], constants: dict[str, Any], capability: int, **options):
    """The kernel for this GPU. Pointers, and integers that aren't excepted, count as multiples of 16, as they are at run
    time where heads have 16 channels or more."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    excepted = set(kernel.do_not_specialize or ())
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith(("*", "i")) and name not in excepted
    }
    given = {(names.index(name),): x for name, x in constants.items() if name in names}
    source = ASTSource(kernel, signature=signature, constexprs=given, attrs=attributes)
    target = (
        GPUTarget("hip", capability, 64) if isinstance(capability, str) else GPUTarget("cuda", capability, 32)
    )
    return triton.compile(source, target=target, options=options)


def resources(binary) -> Resources:
    """What cuobjdump and nvdisasm, which come with Triton, say of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _output(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = _output(TOOLS / "nvdisasm", "-c", file.name)
    number = lambda key: int(re.search(key + r":(\d+)", usage).group(1))  # type: ignore[union-attr]  # noqa: E731
    count = lambda pattern: len(re.findall(pattern, code))  # noqa: E731
    return Resources(
        number("REG"), number("STACK"), binary.metadata.shared,
        count(r"\b(?:HMMA|HGMMA|QGMMA|UTC[A-Z]*MMA)\b"), count(r"\bFFMA2?\b"), count(r"\n\s+/\*[0-9a-f]{4,}\*/"),
    )  # fmt: skip


def _output(*command) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
