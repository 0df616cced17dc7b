"""Contenders take turns; times and memory are those of the calls."""

import time

import pytest
import torch

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.memory import peak_bytes

MIB = 2**20


def test_contenders_take_turns_and_what_they_keep_is_given_back_before_memory_is_read():
    calls = []
    contenders = {
        name: Contender(lambda name=name: calls.append(name), release=lambda: calls.append("r")) for name in "abc"
    }
    timings = measure_in_turns(contenders, Effort(seconds_a_round=0, rounds=(4, 4)))
    assert "".join(calls) == "raarbbrcc" + "abc" * 4 + "rarbrc"
    assert {(x.rounds, x.calls) for x in timings.values()} == {(4, 1)}


@pytest.fixture
def wind(monkeypatch):
    """wind(seconds): the clock goes on by so much, and by nothing else."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def wind(seconds):
        now[0] += seconds

    return wind


def test_times_are_of_one_call_and_slow_calls_are_made_once(wind):
    calls = []
    contenders = {
        "nap": Contender(lambda: wind(0.004)),
        "slow": Contender(lambda: calls.append(wind(1.01)), patience=1.0),
    }
    nap, slow = measure_in_turns(contenders, Effort(0.04, rounds=(3, 3))).values()
    assert (nap.ms, nap.ms_min, nap.ms_max, nap.calls) == pytest.approx((4, 4, 4, 10))  # not the round's, which are 40
    assert len(calls) == slow.rounds == 1
    assert slow.ms == pytest.approx(1010)


def test_memory_is_the_peak_of_the_call():
    """To some 100 KiB a processor: Linux counts pages on each, in batches of 32 and more, and a call may change processors."""
    call = lambda: (torch.ones(64 * MIB // 4) + 1)[:1].clone()  # noqa: E731  two of 64 MiB at once
    call()
    peak = peak_bytes(call)
    if peak is None:
        pytest.skip("the system does not count")
    assert abs(peak - 128 * MIB) < 4 * MIB
    assert peak_bytes(lambda: None) < 4 * MIB
