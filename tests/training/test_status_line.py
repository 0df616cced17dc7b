"""What is seen: a bar on a terminal, lines where there is none, nothing where it is not wanted."""

import io
import sys
from types import SimpleNamespace

import pytest

from tarnn.training.log import StatusLine

TASK = SimpleNamespace(unit="bits_per_byte", counted="tokens", bytes_per_token=1.0, rates=())


class Terminal(io.StringIO):
    def isatty(self):
        return True


def go(status):
    state, args = SimpleNamespace(global_step=0), SimpleNamespace(max_steps=4)
    status.on_train_begin(args, state, None)
    for state.global_step in (1, 2, 3):
        status.on_step_end(args, state, None)
        status.on_log(args, state, None, logs={"loss": 0.6931471805599453 * state.global_step})
    status.on_evaluate(None, state, None, metrics={"eval_measure": 2.5})
    status.on_evaluate(None, state, None, metrics={"eval_measure": 2.6})
    status.close()
    status.close()


def test_a_line_has_the_step_that_its_part_is_of(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tarnn.training.log.LINE_EVERY", -1)
    status = StatusLine(lambda step: step / 4, lambda: 2.0, TASK, 64)
    state, args = SimpleNamespace(global_step=1), SimpleNamespace(max_steps=4)
    status.on_log(args, state, None, logs={"loss": 0.6931471805599453})
    state.global_step = 2
    status.on_step_end(args, state, None)
    assert [line.split("bits")[0] for line in shown.getvalue().splitlines()] == [
        " 25 %  step 1  1.000 ",
        " 50 %  step 2  1.000 ",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_loss_in_bits_per_byte_and_evaluations_that_stay(monkeypatch, terminal):
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    go(StatusLine(lambda step: step / 4, lambda: 2.0, TASK, 64))
    text = shown.getvalue()
    assert ("3.000 bits/byte" if terminal else "25 %  step 1  1.000 bits/byte") in text
    assert "step 3: validation 2.5000 bits/byte  best so far" in text
    assert "step 3: validation 2.6000 bits/byte\n" in text.replace("\x1b[2K", "")
    assert ("75%" in text) == terminal


def test_silence(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    go(StatusLine(lambda step: 0.0, lambda: 2.0, TASK, 64, show=False))
    assert shown.getvalue() == ""


def test_time_done_and_left_and_how_far_a_validation_is(monkeypatch):
    shown, now = io.StringIO(), [0.0]
    monkeypatch.setattr(sys, "stderr", shown)
    status = StatusLine(lambda step: step / 4, lambda: now[0], TASK, 64)
    state, args = SimpleNamespace(global_step=0), SimpleNamespace(max_steps=4)
    status.on_train_begin(args, state, None)
    state.global_step, now[0] = 1, 80.0
    status.on_log(args, state, None, logs={"loss": 0.6931471805599453})
    assert shown.getvalue() == " 25 %  step 1  1.000 bits/byte  1 tokens/s  1:20 done, about 4:00 left\n"
    status.last_line = 0.0
    status.on_prediction_step(args, state, None, done=3, of=8)
    assert " 25 %  validation: 3 of 8 batches  1:20 done, about 4:00 left\n" in shown.getvalue()
