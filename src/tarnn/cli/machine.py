"""Report what tarnn runs on here: versions, processor, threads, and the backend of each op."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import tarnn
from tarnn.cli.threads import described, processors
from tarnn.matmul import refusal
from tarnn.ops import backends


def machine_facts() -> dict[str, Any]:
    """As JSON has it. ValueError for a setting of the kernels that nobody knows."""
    return {
        "versions": {
            "tarnn": tarnn.__version__,
            "torch": torch.__version__,
            **transformers_version(),
            "python": platform.python_version(),
        },
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "quota": processors(),
        "idle_threads": described(),
        "accelerator": accelerator(),
        "products": refusal() or "oneDNN in float32",
        "kernel": backends.cpu_kernels(),
        "products_by": backends.products_by(),
        "gpu_kernel": backends.gpu_kernels(),
        "ops": {op: choice._asdict() for op, choice in backends.choices().items()},
    }


def transformers_version() -> dict[str, str]:
    """Nothing where it is not installed: the ops and layers don't need it."""
    try:
        return {"transformers": version("transformers")}
    except PackageNotFoundError:
        return {}


def processor() -> str:
    """Return the processor's name from Linux; elsewhere what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def accelerator() -> str | None:
    """The first one that torch knows, by name; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    return torch.cuda.get_device_name() if device.type == "cuda" else device.type


def machine_text(facts: dict[str, Any]) -> str:
    """Format the facts as a page."""
    quota = f"; this process may use {facts['quota']:g} processors" if facts["quota"] else ""
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
        "system": facts["system"],
        "processor": f"{facts['processor']}, {facts['cores']} cores",
        "threads": f"{facts['threads']}, waiting by {facts['idle_threads']}{quota}",
        "accelerator": facts["accelerator"] or "none",
        "products": facts["products"],
        "CPU kernel": f"{facts['kernel']['path']}: {facts['kernel']['why']}",
        "packed weights": ", ".join(f"{name} by {how}" for name, how in facts["products_by"].items()) or "none",
    }
    if (gpu := facts["gpu_kernel"]) is not None:
        rows["GPU kernels"] = "{path}: {why} (for {ops})".format(**gpu)
    for op, choice in facts["ops"].items():
        refusals = list(choice["reasons"].values()) if choice["backend"] == "eager" else []
        rows[f"op {op}"] = ": ".join([choice["backend"], *refusals[-1:]])
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())
