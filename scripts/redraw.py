"""Draw the pictures of benchmarks and experiments anew, from the results that were saved. Nothing is measured.

python scripts/redraw.py                                       all pictures
python scripts/redraw.py benchmarks/results/decode.json        those of these results
"""

import argparse
import importlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("", "src", "benchmarks", "experiments")]

from scripts.common import plots  # noqa: E402

# what these draw is not in their results: the attention of a model that was trained
WITHOUT = {"amino_acids", "amino_acids_3000"}


class Row(dict[str, Any]):
    """An object of a results file, whose values are attributes too: scripts draw dataclasses while they measure."""

    def __getattribute__(self, name: str) -> Any:
        return self[name] if name in self else super().__getattribute__(name)  # a value may be called "update"


def script_of(facts: dict[str, Any]) -> str:
    """Return the name of the script that measured; of several commands the first counts."""
    command = facts["command"]
    return Path(shlex.split(command if isinstance(command, str) else command[0])[1]).stem


def redraw(path: Path) -> Path:
    """Draw the picture beside a results file. Returns its path."""
    facts = json.loads(path.read_text(), object_hook=Row)
    module = importlib.import_module(script_of(facts))
    results = module.loaded(facts) if hasattr(module, "loaded") else facts["results"]
    figure = module.figure(argparse.Namespace(**facts.get("settings", {}), threads=facts["threads"]), facts, results)
    plots.save(figure, picture := path.with_suffix(".png"))
    return picture


def drawn() -> list[Path]:
    """Return all results that have a picture which can be drawn from them, by a script that is still there."""
    found = [x for folder in ("benchmarks", "experiments") for x in sorted((ROOT / folder / "results").glob("*.png"))]
    paths = [x.with_suffix(".json") for x in found if x.stem not in WITHOUT]
    return [x for x in paths if (x.parents[1] / f"{script_of(json.loads(x.read_text()))}.py").exists()]


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("results", nargs="*", type=Path, help="JSON files")
    for path in made.parse_args().results or drawn():
        picture = redraw(path)
        print(f"{picture.stat().st_size:9,} bytes  {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
