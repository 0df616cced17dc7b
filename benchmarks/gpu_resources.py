"""The kernels for GPUs, compiled for GPUs that aren't there: registers, spills, shared memory, tensor cores.

    python benchmarks/gpu_resources.py                       # twenty minutes; results/gpu_resources.{json,md}
    python benchmarks/gpu_resources.py --gpus 90 --dtypes bfloat16 --widths 64 --modes plain

A gate: it fails where a kernel that is shipped takes more shared memory than the GPU has, spills more than the budget, has
no instruction of a tensor core, or has so many FFMA that a product must be made of them. No driver is touched, nothing is
run, and no time is measured.
"""

import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import gpu_compiler
import torch
from triton.compiler.errors import CompilationError

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.kernels.features import NAMES
from tarnn.kernels.triton import backward_kernels, forward_kernels, launch
from tarnn.kernels.triton.configurations import SHARED, configuration, padded

KERNELS = {
    "state_sums": forward_kernels, "outputs": forward_kernels, "gradient_sums": backward_kernels,
    "query_gradients": backward_kernels, "key_gradients": backward_kernels, "value_gradients": backward_kernels,
    "decay_gradients": backward_kernels,
}  # fmt: skip
HOLD_VALUES = ("query_gradients", "key_gradients", "decay_gradients")
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked, grouped": {"MASKED": True},
    "not causal": {"CAUSAL": False},
    "decay a token, weighted": {"DECAY": True, "WEIGHTED": True},
    "decay a channel": {"CHANNELS": True},
    "random features": {"FUNCTION": NAMES.index("exp"), "PROJECTED": True, "WEIGHTED": True},
}
FULL = {
    "gpus": [80, 89, 90, 100], "dtypes": ["bfloat16", "float32", "float16"], "widths": [64, 128, 256],
    "modes": list(MODES),
}  # fmt: skip
QUICK = {"gpus": [90], "dtypes": ["bfloat16"], "widths": [64], "modes": ["plain"]}
NAMES_OF_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SPILL = 512  # bytes of a thread's stack
FFMA_SHARE = 0.12  # of all instructions: maps and factors are made of some, products would be most
TABLES, ROWS, OPTIONS = (
    ("items", "chunks", "sequences"),
    ("q", "k", "v", "o", "grad_o", "dq", "dk", "dv"),
    "TSBGRH",
)
NUMBERS = ("eps", "factor", "square", "offset", "shift")
STRIDED = ("q", "k", "v", "o", "x", "grad", "dq", "dk", "dv", "decay", "weight", "mask", "omega", "bias")


@dataclass
class Compiled:
    kernel: str
    mode: str
    dtype: str
    width: int
    gpu: int
    registers: int
    stack: int
    shared: int
    tensor_core: int
    ffma: int
    instructions: int
    seconds: float
    wrong: str


def constants(kernel: str, mode: str, dtype: torch.dtype, width: int, gpu: int) -> tuple[dict[str, Any], Any]:
    """As `Launches` makes them, for heads of this width in all."""
    options = MODES[mode]
    config = configuration(
        dtype, width, width, SHARED[gpu], channels=options.get("CHANNELS", False),
        factors=not options.keys().isdisjoint(("DECAY", "CHANNELS", "WEIGHTED")),
        backward=KERNELS[kernel] is backward_kernels,
    )  # fmt: skip
    low, precision = launch.PRODUCTS[dtype]
    side = padded(width)
    tile = (config.backward_features, side) if kernel in HOLD_VALUES else (side, config.forward_values)
    flags = dict.fromkeys(
        ("PROJECTED", "BIAS", "DECAY", "CHANNELS", "WEIGHTED", "MASKED", "KEEP_STATE", "KEEP_WEIGHT"), False
    )
    return {
        **flags, "D": width, "F": width, "E": width, "BD": side, "BF": tile[0], "BE": tile[1], "C": config.chunk,
        "FUNCTION": NAMES.index("elu"), "CAUSAL": True, "NORMALIZE": True, "GIVEN": True, "KEEP_DEN": True,
        "LOW": low, "PRECISION": precision, **options,
    }, config  # fmt: skip


def type_of(name: str, kernel: Any, dtype: str) -> str:
    """Of an argument, by its name."""
    if name in ROWS:
        return f"*{NAMES_OF_TYPES[dtype]}"
    if name in TABLES:
        return "*i32"
    if name == "mask":
        return "*u8"
    if name in NUMBERS:
        return "fp32"
    stem, _, axis = name.rpartition("_")
    if (axis in ("b", "h", "t") and stem in STRIDED) or (name in OPTIONS and "S_in" not in name):
        state = name == "S" and "z" in kernel.arg_names
        return "*fp32" if state else "i32"
    return "*fp32"


def compile_one(kernel_name: str, mode: str, dtype: str, width: int, gpu: int) -> Compiled:
    kernel = getattr(KERNELS[kernel_name], kernel_name)
    given, config = constants(kernel_name, mode, getattr(torch, dtype), width, gpu)
    given = {name: x for name, x in given.items() if name in kernel.arg_names}
    types = {name: type_of(name, kernel, dtype) for name in kernel.arg_names if name not in given}
    begun = time.perf_counter()
    options = {"num_warps": config.warps, "num_stages": config.stages}
    try:
        found = gpu_compiler.resources(gpu_compiler.compiled(kernel, types, given, gpu, **options))
        fault = wrong(found, gpu)
    except CompilationError as error:
        found = gpu_compiler.Resources(0, 0, 0, 0, 0, 0)
        fault = f"does not compile: {str(error).splitlines()[-1]}"
    seconds = round(time.perf_counter() - begun, 1)
    return Compiled(kernel_name, mode, dtype, width, gpu, *found, seconds, fault)


def wrong(found: gpu_compiler.Resources, gpu: int) -> str:
    """What the gate says; "" where nothing is wrong."""
    room = SHARED[gpu] * 1024
    faults = {
        f"{found.shared} bytes of shared memory, of {room}": found.shared > room,
        f"{found.stack} bytes spilled": found.stack > SPILL,
        "no tensor cores": not found.tensor_core,
        f"{found.ffma} FFMA": found.ffma > FFMA_SHARE * found.instructions,
    }
    return "; ".join(name for name, is_so in faults.items() if is_so)


def shipped(options) -> list[tuple[str, str, str, int, int]]:
    """What is compiled: the plain mode for every dtype, width and GPU asked for, others for the first dtype and width, on
    Hopper or the last GPU asked for. The common ones first, so that an interruption leaves the most."""
    cells = []
    for mode, dtype, width, gpu, kernel in product(
        options.modes, options.dtypes, options.widths, options.gpus, KERNELS
    ):
        first = dtype == options.dtypes[0] and width == options.widths[0]
        hopper = gpu == (90 if 90 in options.gpus else options.gpus[-1])
        if (mode == "plain" or (first and hopper)) and (
            kernel != "decay_gradients" or mode.startswith("decay")
        ):
            rank = options.dtypes.index(dtype) + options.widths.index(width)
            cells.append((rank, (kernel, mode, dtype, width, gpu)))
    return [cell for _, cell in sorted(cells, key=lambda x: x[0])]


def measure(options, results: dict[str, list[Compiled]], keep) -> None:
    found = results.setdefault("kernels", [])
    for cell in shipped(options):
        found.append(compile_one(*cell))
        last = found[-1]
        print(*cell, f"{last.seconds} s", last.wrong or "ok", flush=True)
        keep()


def report(options, facts: dict[str, Any], results: dict[str, list[Compiled]]) -> str:
    faults = [x for x in results["kernels"] if x.wrong]
    header = [
        "kernel",
        "mode",
        "dtype",
        "width",
        "GPU",
        "registers",
        "stack",
        "shared",
        "MMA",
        "FFMA",
        "all",
        "gate",
    ]
    rows = [
        [x.kernel, x.mode, x.dtype, x.width, f"sm_{x.gpu}", x.registers, x.stack, x.shared, x.tensor_core, x.ffma,
         x.instructions, x.wrong or "ok"]
        for x in results["kernels"]
    ]  # fmt: skip
    versions = ", ".join(f"{name} {x}" for name, x in facts["versions"].items())
    return page(
        "What the kernels for GPUs need",
        "Not measured on a GPU: compiled for these GPUs on a machine without one. Nothing was run, no time is given.",
        f"`{facts['command']}`; {versions}; Triton {gpu_compiler.triton.__version__}.",
        f"Per thread: registers, and bytes of stack (spills; budget {SPILL}). Per block: bytes of shared memory. In the "
        "machine code: instructions of tensor cores (MMA), multiplications of single numbers (FFMA), all. One unrolled "
        "body each: how often they are run is not in it. Width: of head, features and values.",
        f"{len(rows)} compiled, {len(faults)} outside of the gate.",
        markdown(header, rows, left=3),
    )


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"modes": list(MODES)})
    found: dict[str, list[Compiled]] = {}
    code = run(options, measure, results=found, report=report)
    return code or int(any(x.wrong for x in found["kernels"]))


if __name__ == "__main__":
    raise SystemExit(main())
