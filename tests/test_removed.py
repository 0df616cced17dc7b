"""Whoever uses a name that is gone reads what to write instead; docs/migration.md shows the same table."""

import importlib
import re
from pathlib import Path

import pytest

import tarnn
from tarnn.cli.main import main
from tarnn.removed import REMOVED, message, message_of_command

MODULES = [name for name in REMOVED if re.fullmatch(r"tarnn(\.\w+)+", name)]
COMMANDS = [name for name in REMOVED if name.startswith("tarnn ")]


@pytest.mark.parametrize("name", MODULES)
def test_an_import_says_what_replaces_it(name):
    package, _, attribute = name.rpartition(".")
    with pytest.raises(ModuleNotFoundError, match=re.escape(message(name))):
        importlib.import_module(name)
    with pytest.raises(ImportError, match=re.escape(message(name))):
        exec(f"from {package} import {attribute}")
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        getattr(importlib.import_module(package), attribute)


def test_a_name_of_a_package_says_what_replaces_it(monkeypatch):
    monkeypatch.setitem(REMOVED, "tarnn.old_attention", "Use `tarnn.linear_attention`.")
    with pytest.raises(AttributeError, match=r"has been removed\. Use `tarnn\.linear_attention`"):
        _ = tarnn.old_attention


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_replaces_it(name, capsys):
    assert main([*name.removeprefix("tarnn ").split(), "somewhere"]) == 2
    assert message(name)[:250] in capsys.readouterr().err


def test_options_are_found_with_their_values():
    assert message_of_command(["serve", "folder", "--port=3"]) == ""
    assert message_of_command([]) == ""
    for line in (["--task", "seq2seq"], ["--task=seq2seq"]):
        assert "examples/pairs.py" in message_of_command(["train", "pairs.tsv", *line])
    assert message_of_command(["train", "seq2seq", "--task", "text"]) == ""


def test_sentences_are_short_and_the_docs_have_them():
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
    for name, sentence in REMOVED.items():
        assert re.fullmatch(r".{10,250}\.", sentence), name
        assert f"| `{name}` | {sentence} |" in page, f"docs/migration.md has no row of {name}, with its sentence"
