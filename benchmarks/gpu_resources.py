"""The kernels for GPUs, compiled for GPUs that aren't there: registers, spills, shared memory, tensor cores, seconds.

    python benchmarks/gpu_resources.py                       # an hour of one core; results/gpu_resources.{json,md}
    python benchmarks/gpu_resources.py --gpus 90 --dtypes bfloat16 --widths 64 --modes plain
    python benchmarks/gpu_resources.py --minutes 10          # go on for so long: what is compiled already is kept

A gate: it fails where a kernel that is shipped takes more shared memory than the GPU has, spills more than the budget, has
no instruction of a tensor core, or has so many FFMA that a product must be made of them. What is compiled is what calls
launch (forward, backward, a step), written down instead of launched; so no driver is touched, nothing is run, and no time
of a kernel is measured. A kernel that didn't change since the last run isn't compiled again.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from toolkit import gpu_compiler
from toolkit.gpu_compiler import Resources, Specialised
from triton.compiler.errors import CompilationError

from scripts.common.options import parse
from scripts.common.results import run
from scripts.common.tables import markdown, page
from tarnn.kernels.linear import Call, Returned
from tarnn.kernels.triton import linear as triton
from tarnn.kernels.triton.configurations import SHARED

MODES: dict[str, dict[str, Any]] = {  # fields of a call; strings name what a tensor is made of
    "plain": {},
    "decay a token": {"log_decay": "bgt"},
    "random features": {"function": "exp", "omega": "1gfd", "square": 0.5},
    "not causal": {"causal": False},
    "decay a channel": {"log_decay": "bgtf"},
    "decay a token, weighted, masked, grouped": {"log_decay": "bgt", "key_log_weight": "bgt", "key_mask": "bt", "g": 1},
}
GPUS = {**{f"sm_{x}": x for x in (90, 80, 89, 100)}, "gfx942": "gfx942"}  # Hopper first
FULL = {
    "gpus": ["sm_90", "sm_80", "sm_89", "sm_100"],
    "dtypes": ["bfloat16", "float32", "float16"],
    "widths": [64, 128, 256],
    "modes": list(MODES),
    "minutes": 600.0,
}
QUICK = {"gpus": ["sm_90"], "dtypes": ["bfloat16"], "widths": [64], "modes": ["plain"]}
SPILL = 512  # bytes of a thread's stack
# columns that a block may take of it, on sm_100; beyond, Triton makes a kernel that only stops
TENSOR_MEMORY = 512
FFMA_SHARE = 0.12  # of all instructions: maps and factors are made of some, products would be most
PROCESSORS = 132  # so that sequences are cut: then all kernels take part


@dataclass
class Compiled:
    """One machine code; `calls`: the kinds of calls that it takes part in, the first of which it was compiled for."""

    kernel: str
    calls: list[str]
    gpu: str
    chunk: int
    tile: str
    warps: int
    registers: int
    stack: int
    shared: int
    tensor_core: int
    ffma: int
    instructions: int
    products: bool
    seconds: float
    wrong: str
    identity: str


# What is outside of the gate and shipped nevertheless: (kernel, call, GPU) and why.
EXPECTED: dict[tuple[str, str, str], str] = {
    ("key_gradients", "decay a channel, float32, 256", "sm_80"): "688 bytes spilled, budget 512",
    ("outputs", "decay a token, weighted, masked, grouped, float32, 64", "sm_100"): "616 bytes spilled, budget 512",
}


def call_of(mode: str, dtype: str, width: int) -> Call:
    """Two chunks at least; its numbers are never read."""
    given = {"causal": True, "function": "elu", "g": 2} | MODES[mode]
    sizes = {"1": 1, "b": 1, "h": 2, "g": given.pop("g"), "t": 256, "d": width, "f": width}
    make = lambda axes, kind: torch.empty([sizes[x] for x in axes], dtype=kind)  # noqa: E731
    q, k, v = (make(axes, getattr(torch, dtype)) for axes in ("bhtd", "bgtd", "bgtd"))
    for name in given.keys() & {"log_decay", "key_log_weight", "omega", "key_mask"}:
        given[name] = make(given[name], torch.bool if name == "key_mask" else torch.float32)
    return Call(q, k, v, **given, eps=1e-6)


def whole_call(call: Call) -> None:
    """Forward, backward and a step."""
    outputs = triton.forward(call)
    triton.backward(call, Returned.of(call, outputs, outputs.o))
    if call.causal:
        first = {
            name: x[:, :, :1]
            for name, x in call._asdict().items()
            if name in ("q", "k", "v", "log_decay", "key_log_weight") and x is not None
        }
        M = outputs.M if call.weighted else None
        triton.step(call._replace(**first, key_mask=None, S=outputs.S, z=outputs.z, M=M))


def kernels_of(mode: str, dtype: str, width: int, gpu: str) -> list[Specialised]:
    call = call_of(mode, dtype, width)
    return gpu_compiler.launched(lambda: whole_call(call), GPUS[gpu], processors=PROCESSORS)


def compile_one(kernel: Specialised, mode: str, dtype: str, width: int, gpu: str) -> Compiled:
    begun = time.process_time() + children()
    try:
        binary = kernel.compiled()
        found = gpu_compiler.resources(binary) if gpu.startswith("sm_") else gpu_compiler.amd_resources(binary)
        columns = getattr(binary.metadata, "tmem_size", None) or 0  # AMD's has none
        fault = wrong(found, gpu)
        if columns > TENSOR_MEMORY:
            fault = f"{columns} columns of tensor memory, of {TENSOR_MEMORY}"
    except (CompilationError, RuntimeError) as error:
        found, fault = Resources(*[0] * 6, False), f"does not compile: {str(error).splitlines()[-1]}"
    seconds = round(time.process_time() + children() - begun, 1)
    spec, names = kernel.constants.get("spec"), kernel.constants
    chunk, tile = (spec.C, f"{spec.BF}×{spec.BE}") if spec else (0, f"×{names.get('B', '')}")
    calls, warps = [f"{mode}, {dtype}, {width}"], kernel.options["num_warps"]
    return Compiled(kernel.name, calls, gpu, chunk, tile, warps, *found, seconds, fault, kernel.identity)


def expected(row: Compiled) -> str | None:
    """Why a kernel outside of the gate is shipped, or None."""
    return next((EXPECTED[x] for x in product([row.kernel], row.calls, [row.gpu]) if x in EXPECTED), None)


def children() -> float:
    """Seconds of processor time of the assembler, which is a process of its own."""
    used = os.times()
    return used.children_user + used.children_system


def wrong(found: Resources, gpu: str) -> str:
    """What the gate says; "" where nothing is wrong."""
    room = SHARED.get(GPUS[gpu], 64) * 1024
    faults = {
        f"{found.shared} bytes of shared memory, of {room}": found.shared > room,
        f"{found.stack} bytes spilled": found.stack > SPILL,
        "no tensor cores": found.products and not found.tensor_core,
        f"{found.ffma} FFMA": found.products and found.ffma > FFMA_SHARE * found.instructions,
    }
    return "; ".join(name for name, is_so in faults.items() if is_so)


def cells(options) -> list[tuple[str, str, int, str]]:
    """The common ones first, so that an interruption leaves the most: by how far each is from the first of its kind, which
    counts twice for modes."""
    names = ("modes", "dtypes", "widths", "gpus")
    all_cells = product(*(enumerate(getattr(options, name)) for name in names))
    return [
        tuple(x for _, x in cell) for cell in sorted(all_cells, key=lambda cell: cell[0][0] + sum(i for i, _ in cell))
    ]  # type: ignore[misc]


def measure(options, results: dict[str, list[Compiled]], keep) -> None:
    begun, found = time.monotonic(), results.setdefault("kernels", [])
    known, missing = earlier(options.out / "gpu_resources.json"), wanted(options)
    for identity in missing.keys() & known.keys():
        _, cells = missing.pop(identity)
        found.append(replace(known[identity], calls=names_of(cells)))
    found += [row for row in known.values() if row.gpu not in options.gpus]
    print(f"{len(found)} are compiled, {len(missing)} are to be", flush=True)
    keep()
    for done, (kernel, cells) in enumerate(missing.values()):
        if time.monotonic() - begun > 60 * options.minutes:
            left = list(missing.values())[done:]
            results["left"] = [", ".join([x.name, *map(str, cells[0])]) for x, cells in left]
            break
        last = compile_one(kernel, *cells[0])
        found.append(replace(last, calls=names_of(cells)))
        print(kernel.name, *cells[0], f"{last.seconds} s", last.wrong or "ok", flush=True)
        if done % 5 == 0:
            keep()


def names_of(cells: list[tuple[str, str, int, str]]) -> list[str]:
    return [", ".join(map(str, cell[:3])) for cell in cells]


def wanted(options) -> dict[str, tuple[Specialised, list[tuple[str, str, int, str]]]]:
    """Every machine code that these calls need, once, by what it depends on; and which calls need it."""
    found: dict[str, tuple[Specialised, list]] = {}
    for cell in cells(options):
        for kernel in kernels_of(*cell):
            calls = found.setdefault(kernel.identity, (kernel, []))[1]
            calls += [] if cell in calls else [cell]
    return found


def earlier(path: Path) -> dict[str, Compiled]:
    """What an earlier run compiled, by what it depends on."""
    rows = json.loads(path.read_text())["results"]["kernels"] if path.exists() else []
    return {row["identity"]: Compiled(**row) for row in rows if row.keys() == Compiled.__annotations__.keys()}


def report(options, facts: dict[str, Any], results: dict[str, Any]) -> str:
    kernels, left = results["kernels"], results.get("left", [])
    faults = [x for x in kernels if x.wrong]
    header = [
        "kernel",
        "compiled for",
        "calls",
        "GPU",
        "chunk",
        "tile",
        "warps",
        "registers",
        "stack",
        "shared",
        "MMA",
        "FFMA",
        "all",
        "s",
        "gate",
    ]
    rows = [
        [
            x.kernel,
            x.calls[0],
            len(x.calls),
            x.gpu,
            x.chunk,
            x.tile,
            x.warps,
            x.registers,
            x.stack,
            x.shared,
            x.tensor_core,
            x.ffma,
            x.instructions,
            x.seconds,
            x.wrong or "ok",
        ]
        for x in sorted(kernels, key=lambda x: (x.calls[0], x.gpu, x.kernel))
    ]
    versions = ", ".join(f"{name} {x}" for name, x in facts["versions"].items())
    return page(
        "What the kernels for GPUs need",
        "Not measured on a GPU: compiled for these GPUs on a machine without one. Nothing was run, no time of a kernel is given.",
        f"`{facts['command']}`; {versions}; Triton {gpu_compiler.triton.__version__}.",
        f"Per thread: registers, and bytes of stack (spills; budget {SPILL}). Per block: bytes of shared memory. In the "
        "machine code: instructions of tensor cores (MMA), multiplications of single numbers (FFMA), all. One unrolled "
        "body each: how often they are run is not in it. Compiled for: mode, dtype, and width of head, features and values; "
        "calls: how many of these kinds of calls run the same machine code. Tile: features × values of a state that a "
        "program holds. s: processor seconds of compiling.",
        f"{len(rows)} compiled, {len(faults)} outside of the gate, {len(left)} not compiled yet.",
        *(f"* {', '.join(where)}: {why}" for where, why in EXPECTED.items()),
        *totals(kernels),
        markdown(header, rows, left=2),
    )


def totals(kernels: list[Compiled]) -> Iterator[str]:
    """What a first call compiles: the kernels of a path, and their seconds."""
    forward = ("row_scales", "chunk_weights", "running_maximum", "state_sums", "prefix", "outputs")
    rows, seconds = [], lambda xs: f"{sum(x.seconds for x in xs):.1f}"
    for cell in product(MODES, FULL["dtypes"], FULL["widths"]):
        call = ", ".join(map(str, cell))
        mine = [x for x in kernels if call in x.calls and x.gpu == "sm_90" and x.kernel != "one_token"]
        first = [x for x in mine if x.kernel in forward]
        if mine:
            longest = max(mine, key=lambda x: x.seconds)
            last = f"{longest.kernel} {longest.seconds}"
            rows.append([call, len(first), seconds(first), len(mine), seconds(mine), last])
    yield markdown(["sm_90", "kernels forward", "s", "with backward", "s", "longest"], rows, left=1)


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices={"modes": list(MODES), "gpus": list(GPUS)})
    found: dict[str, Any] = {}
    code = run(options, measure, results=found, report=report)
    return code or int(any(x.wrong and not expected(x) for x in found["kernels"]))


if __name__ == "__main__":
    raise SystemExit(main())
