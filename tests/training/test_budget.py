"""The learning rate by the clock, and when the clock ends a run."""

import math
from types import SimpleNamespace

import pytest

from tarnn.training.budget import FLOOR, SHARE, WARMUP, Clock, TimeBudget, cosine
from tarnn.training.evaluation import bits_per_byte, perplexity


def test_the_schedule_rises_to_one_and_falls_to_its_floor():
    assert cosine(0) == 0
    assert cosine(WARMUP / 2) == pytest.approx(0.5)
    assert cosine(WARMUP) == 1
    assert cosine(WARMUP + (1 - WARMUP) / 2) == pytest.approx((1 + FLOOR) / 2)
    assert cosine(1) == cosine(2) == pytest.approx(FLOOR)
    values = [cosine(p / 1000) for p in range(20, 1001)]
    assert values == sorted(values, reverse=True)


class Run:
    """A run whose steps, validations and checkpoints take as long as is said; no clock is looked at."""

    def __init__(self, limit, *, max_steps=None, spent=0.0, step=1.0, saving=0.0, batch=0.0, batches=1, every=10):
        self.now, self.step_seconds, self.every, self.evaluations, self.steps = 0.0, step, every, [], 0
        self.budget = TimeBudget(limit, max_steps, lambda: self.now)
        self.budget.begin(spent)
        self.batches = self.budget.plan_validation(batch, batches)
        self.batch, self.saving, self.args = batch, saving, SimpleNamespace(eval_strategy="steps")
        self.rates = []

    def train(self):
        """Runs to its end; the seconds that the whole has taken, the sample included."""
        control = SimpleNamespace(should_training_stop=False)
        while not control.should_training_stop:
            state = SimpleNamespace(global_step=self.steps)
            control.should_evaluate = control.should_save = False
            self.budget.on_step_begin(self.args, state, control)
            self.now += self.step_seconds
            self.rates.append(self.budget.factor(0))
            self.steps += 1
            state.global_step = self.steps
            control.should_evaluate = self.steps % self.every == 0
            self.budget.on_step_end(self.args, state, control)
            if control.should_evaluate:
                self.evaluations.append(self.now)
                self.now += self.batch * self.batches
                self.budget.has_validated(self.batch * self.batches)
            if control.should_save:
                self.now += self.saving
                self.budget.saving = self.saving
        assert control.should_save
        return self.now


def test_steps_end_a_run_where_they_come_first():
    run = Run(100.0, max_steps=50)
    run.train()
    assert (run.steps, run.budget.progress) == (50, 1.0)
    assert Run(100.0, max_steps=50, step=4.0).train() < 100


@pytest.mark.parametrize("batch", [0.0, 0.01, 0.5, 20.0])
@pytest.mark.parametrize("step", [0.05, 1.0, 9.0])
@pytest.mark.parametrize("spent", [0.0, 40.0])
def test_the_whole_keeps_to_its_time_and_validation_to_its_share(batch, step, spent):
    run = Run(200.0, spent=spent, step=step, batch=batch, batches=100)
    seconds = run.train()
    assert spent + seconds + run.budget.sample_seconds <= 200 + 2 * batch  # one batch is the least of validations
    assert spent + seconds + run.budget.sample_seconds >= 200 - 2 * step - 0.01
    assert run.budget.validated <= max(SHARE * 200, 2 * batch)
    assert len(run.evaluations) >= 1
    if batch == 0.01:  # cheap enough for more than the last one
        assert len(run.evaluations) >= min(4, run.steps // 10)
    assert max(run.rates) > 0.9
    assert run.rates[-1] < 0.3


def test_there_is_training_even_if_the_data_took_all_the_time():
    assert Run(10.0, spent=500.0, step=0.1).train() >= 1


def test_the_clock_goes_on_where_the_run_was_interrupted():
    clock = Clock()
    assert clock() == 0
    clock.start(100.0)
    assert 100 <= clock() < 110


def test_measures():
    assert bits_per_byte(nats=math.log(2) * 24, num_bytes=8) == pytest.approx(3)
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e4) == math.inf
