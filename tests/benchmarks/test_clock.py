"""Contenders take turns; times and memory are those of the calls."""

import time
from contextlib import contextmanager

import pytest
import torch
from baselines import release_scratch, tarnn_attend

from scripts.common.clock import Contender, Effort, measure_in_turns, metered
from scripts.common.memory import peak_bytes
from tarnn.kernels.cpu import library

MIB = 2**20


def test_contenders_take_turns_round_by_round():
    calls = []
    contenders = {name: Contender(lambda name=name: calls.append(name)) for name in "abc"}
    timings = measure_in_turns(contenders, Effort(seconds_a_round=0, rounds=(4, 4)))
    assert "".join(calls[6:-3]) == "abc" * 4  # after two warm-ups, before the look at memory
    assert {(x.rounds, x.calls) for x in timings.values()} == {(4, 1)}


@pytest.fixture
def wind(monkeypatch):
    """wind(seconds): the clock goes on by so much, and by nothing else."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wind(seconds):
        now[0] += seconds

    return wind


def test_times_are_of_one_call_whatever_the_number_of_calls(wind):
    [timing] = measure_in_turns({"nap": Contender(lambda: wind(0.004))}, Effort(0.04, rounds=(3, 3))).values()
    assert (timing.ms, timing.ms_min, timing.ms_max) == pytest.approx((4, 4, 4))  # not the round's, which are 40
    assert timing.calls == 10


def test_who_is_slower_than_its_patience_is_called_once(wind):
    calls = []
    contenders = {"slow": Contender(lambda: calls.append(wind(1.01)), patience=1.0), "fast": Contender(lambda: None)}
    timings = measure_in_turns(contenders, Effort(0, rounds=(3, 3)))
    assert len(calls) == timings["slow"].rounds == 1
    assert timings["slow"].ms == pytest.approx(1010)
    assert timings["fast"].rounds == 3


def test_every_call_is_made_in_its_surroundings():
    depth = []

    @contextmanager
    def surroundings():
        depth.append(1)
        yield
        depth.pop()

    seen = []
    measure_in_turns({"x": Contender(lambda: seen.append(len(depth)), surroundings=surroundings)}, Effort(0))
    assert set(seen) == {1}
    assert not depth


def test_what_is_kept_is_given_back_before_each_look_at_memory():
    told = []
    contender = Contender(lambda: told.append("call"), release=lambda: told.append("release"))
    measure_in_turns({"x": contender}, Effort(0, rounds=(3, 3)))
    assert told == ["release", "call", "call", *["call"] * 3, "release", "call"]


def test_scratch_of_the_native_kernels_is_in_their_memory():
    if not library.available():
        pytest.skip("no native kernels here")
    q = torch.randn(1, 8, 64, 128)
    call = lambda: tarnn_attend(q, q, q, True)  # noqa: E731
    peaks = []
    for _ in range(3):
        call()
        kept = peak_bytes(call)
        if kept is None:
            pytest.skip("nobody counts here")
        release_scratch()
        peaks.append(peak_bytes(call) - kept)
    assert max(peaks) > 128 * 128 * 4  # a state is in it


@pytest.mark.parametrize(
    ("seconds", "plan"), [(1e-6, (7, 2000)), (0.01, (7, 3)), (0.5, (5, 1)), (1.0, (3, 1)), (100.0, (3, 1))]
)
def test_the_slower_a_call_the_fewer_of_it(seconds, plan):
    assert Effort().plan(seconds) == plan


def test_memory_is_the_peak_of_the_call():
    call = lambda: (torch.ones(8 * MIB // 4) + 1)[:1].clone()  # noqa: E731  two of 8 MiB at once
    call()
    peak = peak_bytes(call)
    if peak is None:
        pytest.skip("nobody counts here")
    assert abs(peak - 16 * MIB) < MIB / 4  # some pages are there before, some are Python's
    seconds, peak = metered(lambda: time.sleep(0.01), "cpu")
    assert seconds >= 0.01
    assert peak < MIB / 2
