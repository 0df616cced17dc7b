"""Work that takes long says how far it is, and what is left."""

import io
import sys
import time

import pytest

from tarnn.cli.progress import progress
from tarnn.log import silent


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when `clock[0]` is raised."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("tarnn.cli.progress.QUIET", 2.0)
    return now


def lines(clock, seconds, report=None, total=40):
    """What is reported while 40 in pieces of 10 take `seconds` each."""
    said = []
    for _ in progress([10] * 4, total, "tokens read", report or said.append, size=lambda x: x):
        clock[0] += seconds
    return said


def test_a_line_every_few_seconds_with_what_is_left(clock):
    assert lines(clock, 3.0) == [
        "tarnn: tokens read: 10 of 40, about 9 s left",
        "tarnn: tokens read: 30 of 40, about 3 s left",
    ]
    assert lines(clock, 3.0, total=None)[0] == "tarnn: tokens read: 10"


def test_short_work_says_nothing(clock):
    assert lines(clock, 0.4) == []


def test_a_terminal_gets_a_bar_unless_it_is_to_be_quiet(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert lines(clock, 3.0, report=silent) == []
    assert terminal.getvalue() == ""
    assert lines(clock, 3.0) == []
    assert "tokens read" in terminal.getvalue()
