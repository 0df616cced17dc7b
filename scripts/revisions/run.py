"""One part of the comparison in one tree, as its own process: `python run.py TREE PART FOLDER NUMBER`.

What it computed lies in FOLDER/PART.pt: name → tensor, or the sentence with which a call was refused.
"""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]


def use(tree: Path) -> None:
    """`import tarnn` takes the tree's, whatever is installed, and one thread computes."""
    sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in f"{type(x).__module__}{x}".lower()]
    sys.path[:0] = [str(tree / "src"), str(HERE)]
    import torch

    import tarnn

    if not Path(tarnn.__file__ or "").is_relative_to(tree / "src"):
        raise SystemExit(f"tarnn was loaded from {tarnn.__file__}, not from {tree / 'src'}.")
    torch.set_num_threads(1)


def main() -> None:
    tree, part, folder, number = Path(sys.argv[1]).resolve(), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    use(tree)
    import torch

    name, _, write = part.partition(".")
    module = importlib.import_module(f"scripts.revisions.{name}")
    if write:
        module.write(folder)
    else:
        torch.save(module.compute(number, folder), folder / f"{part}.pt")


if __name__ == "__main__":
    main()
