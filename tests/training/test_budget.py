"""The learning rate by the clock, and when the clock ends a run."""

import math
from types import SimpleNamespace

import pytest

from tarnn.training.budget import FLOOR, WARMUP, Clock, TimeBudget, cosine
from tarnn.training.metrics import bits_per_byte, perplexity


def test_the_schedule_rises_to_one_and_falls_to_its_floor():
    assert cosine(0) == 0
    assert cosine(WARMUP / 2) == pytest.approx(0.5)
    assert cosine(WARMUP) == 1
    assert cosine(WARMUP + (1 - WARMUP) / 2) == pytest.approx((1 + FLOOR) / 2)
    assert cosine(1) == cosine(2) == pytest.approx(FLOOR)
    values = [cosine(p / 1000) for p in range(20, 1001)]
    assert values == sorted(values, reverse=True)


def test_a_budget_ends_by_its_minutes_or_its_steps():
    now, control = [0.0], SimpleNamespace(should_training_stop=False)
    budget = TimeBudget(100.0, 50, lambda: now[0])

    def step(seconds, number):
        now[0] = seconds
        budget.on_step_begin(None, SimpleNamespace(global_step=number), control)
        budget.on_step_end(SimpleNamespace(eval_strategy="steps"), None, control)
        return budget.progress, control.should_training_stop

    assert step(10, 1) == (0.1, False)
    assert budget.factor(0) == cosine(0.1)
    assert step(20, 30) == (0.6, False)  # the steps are further than the clock
    assert step(100, 31) == (1.0, True)
    assert control.should_save
    assert control.should_log
    assert control.should_evaluate


def test_the_clock_goes_on_where_the_run_was_interrupted():
    clock = Clock()
    assert clock() == 0
    clock.start(100.0)
    assert 100 <= clock() < 110


def test_measures():
    assert bits_per_byte(nats=math.log(2) * 24, num_bytes=8) == pytest.approx(3)
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e4) == math.inf
