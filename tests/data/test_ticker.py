"""What takes its time says so, and how far it is; what is quick says nothing."""

import itertools
import threading
import time

from tarnn.log import clock_time, ticking


def test_lines_while_something_takes_its_time(monkeypatch):
    monkeypatch.setattr("tarnn.log.FIRST", 0.05)
    monkeypatch.setattr("tarnn.log.THEN", 0.01)
    seconds = itertools.count(0.0, 30.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    lines, threads = [], threading.active_count()
    with ticking("reading", lines.append, lambda: "7 files"):
        while len(lines) < 3:
            time.sleep(0.001)
    assert lines[:3] == ["reading: 0:30, 7 files", "reading: 1:00, 7 files", "reading: 1:30, 7 files"]
    assert threading.active_count() == threads


def test_silence_about_what_is_quick(monkeypatch):
    monkeypatch.setattr("tarnn.log.FIRST", 1000.0)
    lines = []
    with ticking("reading", lines.append):
        pass
    assert lines == []


def test_times_that_cannot_be_mistaken():
    assert [clock_time(x) for x in (0, 59.6, 65, 3599, 3665)] == ["0:00", "1:00", "1:05", "59:59", "1:01:05"]
