"""What counts as a line of code."""

from scripts.size import check, over_budget, report, size_of

FILE = '''"""A docstring
of two lines."""

import os
from pathlib import (
    Path,
)

# a comment


def f(x):
    """Another."""
    text = """no
    docstring"""  # fmt: skip
    return x, text
'''


def test_docstrings_comments_blanks_and_imports_are_no_code():
    assert size_of(FILE) == (1, 16, 4, 4, 1)


def test_rooms_are_added_up_and_long_files_listed():
    table = report({"a/b.py": FILE, "a/c.py": FILE, "d.py": "x = 1\n" * 301}).splitlines()
    assert [row.split() for row in table[1:4]] == [
        ["(top", "level)", "1", "301", "301", "0", "0"],
        ["a", "2", "32", "8", "8", "2"],
        ["all", "3", "333", "309", "8", "2"],
    ]
    assert table[-2:] == ["1 files above 300 lines:", "   301 d.py"]


def test_what_exceeds_the_budget_is_named():
    budget = {"src": {"lines": 30, "code": 99, "files": 2}, "rooms": {"a": 32}, "outside": {"tests": 5}}
    texts = {"a/b.py": FILE, "a/c.py": FILE}
    over = over_budget(budget, {**texts, "d.py": "x = 1\n"}, {"tests": 6})
    assert [line.split(" in ")[0] for line in over] == [
        "src/tarnn, lines: 33, of 30",
        "src/tarnn, files: 3, of 2",
        "src/tarnn/(top level), lines: 1, of 0",
        "tests, lines: 6, of 5",
    ]
    assert over_budget(budget | {"src": {"lines": 32, "code": 8, "files": 2}}, texts, {"tests": 5}) == []


def test_the_house_is_within_its_budget():
    assert check() == 0
