"""The log: what is in a line, and what is forgotten when a run is resumed."""

import json
from types import SimpleNamespace

import pytest

from tarnn.training.log import LogFile, cut_log, read_log

TASK = SimpleNamespace(unit="bits_per_byte", counted="tokens", epoch=640, bytes_per_token=4.0, rates=())


def test_lines_beyond_the_step_and_half_lines_are_cut(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    cut_log(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    cut_log(path, -1)
    assert path.read_text() == ""
    cut_log(tmp_path / "new.jsonl", 5)
    assert (tmp_path / "new.jsonl").read_text() == ""


def test_a_line_of_training_and_one_of_evaluation(tmp_path):
    log = LogFile(tmp_path / "log.jsonl", lambda: 1.5, TASK, 64)
    state = SimpleNamespace(global_step=5, is_world_process_zero=True)
    log.on_log(None, state, None, logs={"loss": 2.0, "learning_rate": 0.1, "grad_norm": 3.0})
    log.on_log(None, state, None, logs={"eval_loss": 1.0, "eval_measure": 0.5, "eval_perplexity": 2.7})
    log.on_log(None, state, None, logs={"train_runtime": 3})
    state.is_world_process_zero = False
    log.on_log(None, state, None, logs={"loss": 9.0})
    training, evaluation = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    assert training == {
        "step": 5,
        "epoch": 0.5,
        "seconds": 1.5,
        "tokens": 320,
        "loss": 2.0,
        "bits_per_byte": pytest.approx(2 / (4 * 0.6931471805599453)),
        "learning_rate": 0.1,
        "grad_norm": 3.0,
    }
    assert evaluation == {
        "step": 5,
        "epoch": 0.5,
        "seconds": 1.5,
        "validation_loss": 1.0,
        "validation_bits_per_byte": 0.5,
        "validation_perplexity": 2.7,
    }
