"""Print the lowest versions that pyproject.toml allows, as constraints for pip; `make test-oldest` installs them.

python scripts/floors.py > build/floors.txt

Tools of the extra `dev` have no lowest version: they stay at that of constraints.txt.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[1]


def floors(pyproject: dict, lock: str) -> list[str]:
    """`name==version` for each package that is required; one without a lowest version takes its line of the lock."""
    project = pyproject["project"]
    extras = project["optional-dependencies"].values()
    versions = dict(line.split("==") for line in lock.splitlines() if "==" in line)
    lowest = {}
    for requirement in chain(project["dependencies"], *extras, pyproject["build-system"]["requires"]):
        name, minimum = re.match(r"([\w-]+)(?:>=([\w.]+))?", requirement).groups()
        if name != project["name"]:
            lowest[name] = minimum or versions[name]
    return [f"{name}=={version}" for name, version in sorted(lowest.items())]


if __name__ == "__main__":
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    print(*floors(pyproject, (ROOT / "constraints.txt").read_text(encoding="utf-8")), sep="\n")
