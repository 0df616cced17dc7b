"""A page begins with what it is for, shortly, and ends where the next one begins."""

import re
from pathlib import Path

import pytest
from support.code_blocks import PAGES

MOST_WORDS = 60
# versions and sizes that are a part of a name: Qwen3.5, int8, Mamba-2, Granite 4, elu + 1, Python 3.11
NAMES = re.compile(r"[\w.]*[A-Za-z][\w.]*(-?\d[\d.]*)+|\b(Granite|Python|torch|transformers) \d[\d.]*|elu \+ 1")


def first_paragraph(page: Path) -> str:
    """Return the first prose of a page as it is read: without marks, targets of links, and code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = (
        part for part in re.split(r"\n\s*\n", text) if part.strip() and not part.lstrip().startswith(("#", "|", "!"))
    )
    words = re.sub(r"\]\([^)]*\)|[\[\]*]", " ", next(prose))
    return re.sub(r"`[^`]*`", "code", words)


def faults(page: Path) -> list[str]:
    """Return what a newcomer stumbles over in the first paragraph: too many words, or a figure."""
    paragraph = first_paragraph(page)
    count, figures = len(paragraph.split()), re.findall(r"\d[\d.,]*", NAMES.sub("", paragraph))
    long = [f"{count} words, at most {MOST_WORDS}"] if count > MOST_WORDS else []
    return long + [f"the figure {x}, before it is said what is counted" for x in figures]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_paragraph_is_short_and_without_figures(page: Path):
    assert faults(page) == [], first_paragraph(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_guide_ends_where_the_next_begins(page: Path):
    """In its last lines, by a link to another page."""
    end = page.read_text(encoding="utf-8").rsplit("**Next:**", 1)
    assert page.name == "README.md" or (len(end) == 2 and re.search(r"\]\([\w/.-]+\.md", end[1]) and len(end[1]) < 400)


def test_a_beginning_that_breaks_the_rule_is_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# Title\n\n```sh\ntarnn info\n```\n\nIt takes 12 ms with Qwen3.5 in `int8`. {'so ' * 60}\n\nNext 3.\n"
    )
    assert faults(page) == ["68 words, at most 60", "the figure 12, before it is said what is counted"]
