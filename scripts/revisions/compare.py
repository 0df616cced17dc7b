"""Does a revision compute what another did, to the bit, and open all that it wrote?

    python -m scripts.revisions.compare HEAD~5                    # against this checkout; some twenty minutes
    python -m scripts.revisions.compare ../before --quick         # a checkout in place of a revision; two minutes

Four parts, each in one process a revision: `ops` (drawn calls of every op: outputs, states, gradients, refusals),
`texts` (of drawn small models that the old revision saved) and `files` (its checkpoints, a run of it cut short and resumed, its
states, a converted folder) and `tasks` (a run of every other task, resumed, measured and asked). The old revision must have
compiled kernels too: give a checkout that has them, or they are built in a worktree of their own, which goes afterwards.
Exit code 1 where anything differs by more than --rounding.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from scripts.revisions.run import HERE

PARTS = {"ops": 400, "texts": 1000, "files": 60, "tasks": 1}
QUICK = {"ops": 10, "texts": 20, "files": 10, "tasks": 1}
RUN = HERE / "scripts" / "revisions" / "run.py"


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("old", help="a revision, or a checkout of one with its kernels")
    made.add_argument("--new", type=Path, default=HERE, help="a checkout (default: this one)")
    made.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    made.add_argument(
        "--rounding", type=float, help="the largest difference allowed, relative to 1 + |x| (default: to the bit)"
    )
    made.add_argument("--quick", action="store_true", help="few of each: to see that it runs")
    options = made.parse_args()
    numbers, red = QUICK if options.quick else PARTS, 0
    with tempfile.TemporaryDirectory() as folder, checkout(options.old) as old:
        for part in options.only:
            lines = compared(part, numbers[part], old, options.new, Path(folder), options.rounding)
            print("\n".join(lines), flush=True)
            red += len(lines) > 1
    return int(red > 0)


@contextmanager
def checkout(old: str) -> Iterator[Path]:
    """The folder of a checkout, or a worktree of the revision with kernels built for it."""
    if (Path(old) / "src" / "tarnn").is_dir():
        yield Path(old).resolve()
        return
    place = Path(tempfile.mkdtemp()) / "old"
    ask("git", "worktree", "add", "--detach", str(place), old, at=HERE)
    try:
        build = [
            "cmake",
            "-S",
            ".",
            "-B",
            "build/dev",
            "-G",
            "Ninja",
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DTARNN_IN_PLACE=ON",
        ]
        ask(*build, at=place)
        ask("cmake", "--build", "build/dev", at=place)
        yield place
    finally:
        ask("git", "worktree", "remove", "--force", str(place), at=HERE)


def ask(*words: str, at: Path) -> None:
    bin = str(Path(sys.executable).parent)
    subprocess.run(
        words, cwd=at, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"}
    )


def compared(part: str, number: int, old: Path, new: Path, folder: Path, rounding: float | None) -> list[str]:
    """What to say of a part: one line where all is as it was, and one more for each thing that differs."""
    here, there = folder / "new", folder / "old"
    here.mkdir(exist_ok=True)
    there.mkdir(exist_ok=True)
    if part in ("files", "tasks"):
        run(old, f"{part}.write", there, number)
        shutil.copytree(there, here, dirs_exist_ok=True)
    run(old, part, there, number)
    if part == "texts":
        shutil.copytree(there, here, dirs_exist_ok=True)
    run(new, part, here, number)
    a, b = (torch.load(x / f"{part}.pt") for x in (there, here))
    wrong = [line for name in {**a, **b} if (line := difference(name, a.get(name), b.get(name), rounding))]
    refused = sum(isinstance(x, str) and "refused" in name for name, x in a.items())
    return [f"{part}: {len(a):,} values, {refused} of them refusals; {len(wrong)} differ", *wrong]


def run(tree: Path, part: str, folder: Path, number: int) -> None:
    """One part in one tree. What it says (of trainings, of loading) is heard only where it fails."""
    words = [sys.executable, str(RUN), str(tree), part, str(folder), str(number)]
    done = subprocess.run(words, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr}\n{part} of {tree} failed; see above.")


def difference(name: str, a, b, rounding: float | None) -> str:
    """A line, or "" where the two are the same: tensors to the bit or within rounding, refusals whatever they say."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return "" if a == b or ("refused" in name and None not in (a, b)) else f"  {name}: {a!s:.150} | {b!s:.150}"
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"  {name}: {a.dtype} {tuple(a.shape)} | {b.dtype} {tuple(b.shape)}"
    if torch.equal(bits(a), bits(b)):
        return ""
    x, y = a.double(), b.double()
    off = ((x - y).abs() / (1 + x.abs())).nan_to_num(torch.inf)[bits(a) != bits(b)].max().item()
    return "" if rounding is not None and off <= rounding else f"  {name}: off by {off:.1e}"


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where x's bits are."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(whole[x.element_size()]) if x.is_floating_point() else x


if __name__ == "__main__":
    raise SystemExit(main())
