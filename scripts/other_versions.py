"""Run the tests that other versions of torch, transformers and the rest break first; print what broke, by family of models.

python scripts/other_versions.py        in an environment of `make test-oldest` or `make test-newest`
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TESTS = (
    "ops", "attention", "feature_maps", "models", "decoding", "huggingface", "conversion/test_families.py", "data",
    "tasks", "serving/http/test_completions.py", "test_installation.py",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "peft", "numpy", "datasets", "starlette", "pydantic")


class Row:
    """The tests of one family, or of one folder: how many ran, how many failed, and the first error."""

    def __init__(self) -> None:
        self.tests, self.failed, self.why = 0, 0, ""

    def count(self, error: str | None) -> None:
        self.tests += 1
        if error is not None:
            self.failed += 1
            self.why = self.why or error


def rows_of(report: ElementTree.Element, families: Iterable[str], kept: dict[str, str]) -> dict[str, Row]:
    """Rows from pytest's XML: a test whose parameter names one of the families is that family's.

    kept: family → why `patch_transformers` leaves it as it is.
    """
    longest_first = "|".join(map(re.escape, sorted(families, key=len, reverse=True)))
    of_a_family = re.compile(rf"\[(?:.*-)?({longest_first})(?:-.*)?\]$")
    rows: dict[str, Row] = {}
    for case in report.iter("testcase"):
        file, name = case.get("classname") or case.get("name", ""), case.get("name", "")
        family = of_a_family.search(name)
        key = family[1] if family else "/".join(file.split(".")[:2])
        if case.find("skipped") is None:
            failure = next((x for x in case if x.tag in ("failure", "error")), None)
            rows.setdefault(key, Row()).count(None if failure is None else failure.get("message", "").split("\n")[0])
    for family, why in kept.items():
        rows.setdefault(family, Row()).why = f"not patched: {why}"
    return rows


def table(rows: dict[str, Row]) -> str:
    """The rows with failures, and a line that counts the others."""
    broken = {key: row for key, row in sorted(rows.items()) if row.why}
    lines = [
        f"| {key} | {row.failed} of {row.tests} | {row.why.replace('|', '/')[:160]} |" for key, row in broken.items()
    ]
    fine = f"{sum(row.tests - row.failed for row in rows.values()):,} tests passed, of {len(rows)} families and folders"
    return "\n".join(
        ["| family or folder | failed | first error |", "|---|--:|---|", *lines, "", fine] if broken else [fine]
    )


def main() -> int:
    smoke = subprocess.run([sys.executable, "tests/smoke.py"], cwd=ROOT)
    xml = Path(sys.prefix) / "tests.xml"
    options = ["-n", "2", "-q", "-m", "not compile and not slow and not thorough", "--continue-on-collection-errors"]
    tests = [f"tests/{x}" for x in TESTS]
    suite = subprocess.run([sys.executable, "-m", "pytest", *options, f"--junitxml={xml}", *tests], cwd=ROOT)
    sys.path.insert(0, str(ROOT / "tests"))
    from support import families, linear_families

    import tarnn

    names = {*families.FAMILIES, *linear_families.FAMILIES}
    rows = rows_of(ElementTree.parse(xml).getroot(), names, tarnn.patch_transformers().kept)
    rows.setdefault("tests/smoke.py", Row()).count("see above" if smoke.returncode else None)
    rows.setdefault("pytest", Row()).count(
        None if suite.returncode in (0, 1) else "it did not run to its end: see above"
    )
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES), "", table(rows), sep="\n")
    return int(any(row.why for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
