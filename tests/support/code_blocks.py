"""The code blocks of README and docs: which there are, and what a reader who pastes them does."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# what a shell block may begin with besides tarnn: these install, download, take minutes, or are checked elsewhere
PLACES = ("python benchmarks/", "python experiments/", "python tests/")
NOT_RUN = ("make", "pip", "hf download", "cmake", "torchrun", "git", *PLACES)


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text()
    return [Block(page, text[: found.start()].count("\n") + 1, found[1], found[2]) for found in FENCE.finditer(text)]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, as words; comments and what is printed are left out."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):  # then the other lines are what the commands print
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    words = [shlex.split(line, comments=True) for line in lines]
    return [one for one in words if one]


def unfenced_code(page: Path) -> list[str]:
    """Indented lines that look like code or commands: they would escape from the tests."""
    text = FENCE.sub("", page.read_text())
    looks = re.compile(r"^ {4,}(\$ |tarnn [a-z]|import |from \w+ import|pip |python )", re.MULTILINE)
    return [match.group(0).strip() for match in looks.finditer(text)]
