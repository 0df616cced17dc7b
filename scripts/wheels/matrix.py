"""Install the wheel in dist/ into clean environments, one for each Python and torch, and run tests/smoke.py there, outside of the
checkout.

    python scripts/wheels/matrix.py 3.11 torch==2.10.0        one of each
    python scripts/wheels/matrix.py 3.11,3.12 torch==2.10.0 torch

Each row of the table that it prints names the versions that ran. Environments lie in build/matrix, several gigabytes each with
CUDA, and are deleted again; --keep leaves them for the next wheel, which is then the only new thing in them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FACTS = """
import json, platform, sys, transformers, torch
from tarnn.kernels.cpu import library
print(json.dumps([platform.python_version(), torch.__version__, transformers.__version__, library.status().path]))
"""
HEAD = "| Python | torch | transformers | kernels | tests/smoke.py |\n|---|---|---|---|---|"


def row(python: str, torch: str, wheel: Path, keep: bool) -> str:
    """Make an environment, install, run; return the row. CalledProcessError where pip fails."""
    folder = ROOT / "build/matrix" / f"{python}-{torch.replace('==', '-')}"
    own = folder / "bin/python"
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    if not own.exists():
        subprocess.run([f"python{python}", "-m", "venv", folder], check=True)
        subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-cache-dir", torch, f"{wheel}[hf]"], check=True)
    subprocess.run([own, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel], check=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        began = time.perf_counter()
        smoke = subprocess.run([own, ROOT / "tests/smoke.py"], cwd=elsewhere, capture_output=True, text=True)
        seconds = time.perf_counter() - began
        facts = subprocess.run([own, "-c", FACTS], cwd=elsewhere, capture_output=True, text=True, check=True)
    print(smoke.stdout, smoke.stderr, sep="\n", file=sys.stderr)
    if not keep:
        shutil.rmtree(folder)
    passed = "passes" if smoke.returncode == 0 else "**fails**"
    return "| " + " | ".join([*json.loads(facts.stdout), f"{passed}, {seconds:.0f} s"]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", help="with commas: 3.11,3.12")
    parser.add_argument("torch", nargs="+", help="as pip takes it: torch==2.10.0, torch")
    parser.add_argument("--keep", action="store_true", help="take environments that are there, and leave them")
    options = parser.parse_args()
    wheels = sorted((ROOT / "dist").glob("tarnn-*-manylinux*.whl"))
    if len(wheels) != 1:
        parser.error(f"dist/ has {len(wheels)} wheels for Linux where one was expected; `make wheels` builds it.")
    rows = [
        row(python, torch, wheels[0], options.keep) for python in options.pythons.split(",") for torch in options.torch
    ]
    print(wheels[0].name, "", HEAD, *rows, sep="\n")
    sys.exit(any("fails" in each for each in rows))


if __name__ == "__main__":
    main()
