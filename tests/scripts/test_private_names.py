"""Tests hold tarnn to what it promises, not to how it is written."""

import ast

from scripts.private_names_in_tests import private_names, uses

MOST = 20  # lower it with every test that needs fewer


def test_they_only_become_fewer():
    found = uses()
    assert sum(sum(names.values()) for names in found.values()) <= MOST, found


def test_all_ways_to_name_them_are_seen():
    tree = ast.parse(
        "from tarnn.x import _a\nx._b()\nmonkeypatch.setattr(x, '_c', 1)\nmock.patch('tarnn.x._d')\nx.__e__"
    )
    assert sorted(private_names(tree)) == ["_a", "_b", "_c", "_d"]
