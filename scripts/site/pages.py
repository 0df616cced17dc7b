"""Put the pages of the site into one folder, laid out as the repository, so that their links hold."""

import re
import shutil
from pathlib import Path

from scripts.site.check import links

PATTERNS = (
    "*.md", "docs/*.md", "docs/decisions/*.md", "csrc/README.md", "benchmarks/*.md", "benchmarks/results/*.md",
    "experiments/*.md", "experiments/results/*.md", "scripts/dev/results/*.md",
)  # fmt: skip


def stage(root: Path, target: Path) -> list[Path]:
    """Copy pages, and the files that they link to; return the guides, docs/*.md."""
    pages = sorted({page for pattern in PATTERNS for page in root.glob(pattern)})
    for page in pages:
        copy(page, target / page.relative_to(root))
        for _, found in links(page.read_text(encoding="utf-8")):
            path = found["target"].partition("#")[0]
            linked = (page.parent / path).resolve()
            if path and not re.match(r"\w+:", path) and linked.is_file() and linked.is_relative_to(root):
                copy(linked, target / linked.relative_to(root))
    for page in sorted((root / "docs" / "site").glob("*.md")):
        if page.name != "errors.md":  # a part of reference/errors.md
            copy(page, target / page.name)
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def copy(source: Path, target: Path) -> None:
    """Copy a file that is not there yet."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
