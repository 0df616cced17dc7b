"""A docstring begins with a verb, or with the name of the thing."""

import ast
import re

from support.house import TREES

RIDDLES = re.compile(r"(What|Whose|Who|Whoever|Of|Those|That|The same|Nobody|So|Beyond)\b")


def test_docstrings_begin_with_a_verb_or_a_name():
    """A reader should not have to read on to the end to understand the first word."""
    riddles = [
        f"{module}:{getattr(node, 'name', '')}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and RIDDLES.match(ast.get_docstring(node) or "")
    ]
    assert not riddles, f"Write what it does first, as in “Return …” or “Compute …”: {riddles}"
