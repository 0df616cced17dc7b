"""The record of a run: one place for defaults, refused when it makes no sense, compared on resume."""

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tarnn.cli import train as command
from tarnn.errors import UserError
from tarnn.training.arguments import OWN, parse_assignments, training_arguments
from tarnn.training.settings import MAY_CHANGE, TrainSettings

RUN = TrainSettings(("text",), Path("out"))


def test_the_command_has_every_setting_with_its_default():
    parameters = inspect.signature(command.train).parameters
    for field in fields(TrainSettings):
        if field.name not in ("sources", "out", "steps", "training_arguments"):
            assert parameters[field.name].default == field.default, field.name
    assert set(parameters) - {f.name for f in fields(TrainSettings)} == {"set_"}


def test_a_resumed_run_shares_all_choices_but_those_of_length_and_of_looking():
    saved = RUN.as_json()
    assert RUN.differences(saved) == []
    longer = replace(RUN, steps=5000, out=Path("moved"), eval_every=7, resume=True)
    assert longer.differences(saved) == []
    assert replace(RUN, context=128, sources=("a", "b")).differences(saved) == [
        ("--context", 256, 128),
        ("TEXT", ["text"], ["a", "b"]),
    ]
    assert {f.name for f in fields(TrainSettings)} >= MAY_CHANGE


@pytest.mark.parametrize(
    ("save_every", "log_every"), [(250, 10), (7, 7), (13, 1), (1, 1), (12, 6), (1000, 10)]
)
def test_every_checkpoint_falls_on_a_line_of_the_log(save_every, log_every):
    assert replace(RUN, save_every=save_every).log_every == log_every


def test_assignments_are_json_where_they_can_be():
    given = ["weight_decay=0.5", "optim=adamw_torch", "tf32=false", 'lr_scheduler_kwargs={"a": 1}']
    assert parse_assignments(given) == {
        "weight_decay": 0.5, "optim": "adamw_torch", "tf32": False, "lr_scheduler_kwargs": {"a": 1},
    }  # fmt: skip
    for key in OWN:
        with pytest.raises(UserError, match=f"--set {key}: use --"):
            parse_assignments([f"{key}=1"])


def test_what_is_set_wins_over_what_we_set(tmp_path):
    args = training_arguments(
        replace(RUN, out=tmp_path, training_arguments={"weight_decay": 0.5, "adam_beta2": 0.99})
    )
    assert (args.weight_decay, args.adam_beta2, args.adam_beta1) == (0.5, 0.99, 0.9)
