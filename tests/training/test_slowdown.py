"""One line when training becomes three times as slow: by a clock that the test winds on."""

from tarnn.training.slowdown import Slowdown


class Run:
    def __init__(self):
        self.now, self.lines = 0.0, []
        self.watch = Slowdown(lambda: self.now, self.lines.append)

    def steps(self, count, seconds):
        for _ in range(count):
            self.watch.on_step_begin(None, None, None)
            self.now += seconds
            self.watch.on_step_end(None, None, None)
            self.now += 1000.0  # validation, saving


def test_a_third_of_the_speed_is_said_once():
    run = Run()
    run.steps(10, 2.0)  # the first steps are slow: they are no measure
    run.steps(20, 0.5)
    run.steps(20, 1.4)
    assert run.lines == []
    run.steps(40, 1.6)
    expected = (
        "A step takes 3.2 times as long as it did: 1,600 ms, before 500. Another program may be using the processor."
    )
    assert run.lines == [expected]


def test_it_is_said_again_after_it_was_fast_again():
    run = Run()
    for _ in range(2):
        run.steps(10, 0.5)
        run.steps(10, 2.0)
    run.steps(10, 1.2)  # better, and not yet well
    run.steps(10, 2.0)
    assert len(run.lines) == 2


def test_one_long_step_is_none_of_it():
    run = Run()
    run.steps(10, 0.5)
    run.steps(1, 3600.0)
    run.steps(30, 0.5)
    assert run.lines == []


def test_short_steps_are_judged_by_seconds_together():
    run = Run()
    run.steps(1250, 0.004)
    run.steps(415, 0.012)
    assert run.lines == []
    run.steps(5, 0.012)
    assert len(run.lines) == 1
