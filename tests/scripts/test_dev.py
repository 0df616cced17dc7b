"""Every script opens."""

import sys

import pytest
from support.scripts import ROOT, opens, runnable

sys.path.append(str(ROOT / "scripts" / "dev"))

SCRIPTS = [*runnable("benchmarks"), *runnable("experiments"), *runnable("scripts/dev")]


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_opens(name, monkeypatch):
    assert opens(name, monkeypatch)
