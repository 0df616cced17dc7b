"""The record of a run: one place for defaults, refused when it makes no sense, compared on resume."""

import inspect
from dataclasses import fields, replace
from pathlib import Path

import pytest

from tarnn.cli import train as command
from tarnn.errors import UserError
from tarnn.tasks import TASKS, ImageSettings, TextSettings, own_options
from tarnn.tasks.settings import parse_assignments
from tarnn.training.arguments import OWN, training_arguments

RUN = TextSettings(("text",), Path("out"))


def test_the_command_has_every_setting_with_its_default():
    parameters = inspect.signature(command.train).parameters
    every = {field.name: field for task in TASKS.values() for field in fields(task.settings_class)}
    for field in every.values():
        if field.name not in ("sources", "out", "training_arguments", "feature_map_options"):
            assert parameters[field.name].default == field.default, field.name
    assert set(parameters) - set(every) == {"task"}


def test_a_resumed_run_shares_all_choices_but_those_of_length_and_of_looking():
    saved = RUN.as_json()
    assert RUN.differences(saved) == []
    longer = replace(RUN, steps=5000, out=Path("moved"), eval_every=7, resume=True)
    assert longer.differences(saved) == []
    assert replace(RUN, context=128, sources=("a", "b")).differences(saved) == [
        ("--context", 256, 128),
        ("SOURCE", ["text"], ["a", "b"]),
    ]
    image = ImageSettings(("text",), Path("out"))
    assert ("--task", "text", "image") in image.differences(saved)
    assert replace(image, sample_images=3).differences(image.as_json()) == []


@pytest.mark.parametrize(("save_every", "log_every"), [(250, 10), (7, 7), (13, 1), (1, 1), (12, 6), (1000, 10)])
def test_every_checkpoint_falls_on_a_line_of_the_log(save_every, log_every):
    assert replace(RUN, save_every=save_every).log_every == log_every


def test_assignments_are_json_where_they_can_be():
    given = ["weight_decay=0.5", "optim=adamw_torch", "tf32=false", 'lr_scheduler_kwargs={"a": 1}']
    assert parse_assignments(given) == {
        "weight_decay": 0.5,
        "optim": "adamw_torch",
        "tf32": False,
        "lr_scheduler_kwargs": {"a": 1},
    }
    for key in OWN:
        with pytest.raises(UserError, match=f"--set {key}: use --"):
            training_arguments(replace(RUN, training_arguments={key: 1}))


def test_what_is_set_wins_over_what_we_set(tmp_path):
    args = training_arguments(replace(RUN, out=tmp_path, training_arguments={"weight_decay": 0.5, "adam_beta2": 0.99}))
    assert (args.weight_decay, args.adam_beta2, args.adam_beta1) == (0.5, 0.99, 0.9)


def test_the_paper_preset_of_images_is_trained_as_its_scripts_do(tmp_path):
    paper = ImageSettings(("digits",), tmp_path, preset="paper")
    assert (paper.optimizer, paper.learning_rate) == ("radam", 1e-4)
    args = training_arguments(paper)
    assert (args.weight_decay, args.adam_beta2, args.lr_scheduler_type) == (0.01, 0.999, "constant")
    modern = ImageSettings(("digits",), tmp_path)
    assert (modern.optimizer, modern.learning_rate, modern.recipe) == ("adamw", 1e-3, {})
    assert training_arguments(replace(paper, optimizer="adamw")).weight_decay == 0.1
    assert TextSettings(("text",), tmp_path, preset="paper").learning_rate == 1e-3


def test_what_images_refuse():
    with pytest.raises(UserError, match="--optimizer sgd is not known; expected adamw or radam"):
        ImageSettings(("digits",), Path("out"), optimizer="sgd")
    with pytest.raises(UserError, match="one source at a time; got 2: a, b"):
        ImageSettings(("a", "b"), Path("out"))
    with pytest.raises(UserError, match="--mixtures 0 is not possible"):
        ImageSettings(("digits",), Path("out"), mixtures=0)
    for part, expected in ((1.0, "a number below 1"), (-0.5, "0 or more"), (float("nan"), "0 or more")):
        with pytest.raises(UserError, match=f"--val-fraction {part} is not possible; expected {expected}"):
            ImageSettings(("digits",), Path("out"), val_fraction=part)
    assert set(own_options("text")) == {"text_field", "tokenizer", "context", "sample_tokens", "start"}
