"""A task is one class: this one, trains, validates, saves and has its options on the command line by being registered."""

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tarnn.cli import train as command
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.tasks import TASKS, RunSettings, Sample, Task, register, task_of
from tarnn.tasks.base import sums
from tarnn.tasks.settings import option
from tarnn.training.run import train


@dataclass(frozen=True)
class CountingSettings(RunSettings):
    highest: int = option(7, "Count up to this number.", "Counting", least=2)


class Counting(Task):
    """Rows that count: 3, 4, 5, 6, 0, 1 …"""

    name, model_type, of = "counting", "tarnn_counting", "numbers"
    architecture = "Counter"
    settings_class = CountingSettings
    unit, counted = "bits_per_number", "rows"
    LENGTH = 9

    def __init__(self, settings, first, saved, log):
        self.settings = settings
        starts = np.arange(64)[:, None] + np.arange(self.LENGTH + 1)
        self.examples = Rows(torch.from_numpy(starts % settings.highest))
        self.epoch, self.data_facts = len(self.examples), {"rows": len(self.examples)}

    @classmethod
    def classes(cls):
        return TarnnConfig, TarnnForCausalLM

    @classmethod
    def check(cls, settings):
        pass

    def config(self):
        return TarnnConfig(
            hidden_size=self.settings.hidden_size,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=self.settings.highest,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    @staticmethod
    def collate(rows):
        return {"input_ids": rows[:, :-1], "targets": rows[:, 1:]}

    def validation(self, batch_size):
        return [self.collate(self.examples.rows[:16])]

    def loss(self, model, batch):
        logits = model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())

    def outcome(self, model, batch):
        count = batch["targets"].numel()
        return sums(self.loss(model, batch).double() * count, count, count), []

    has_sample = True

    def sample(self, max_seconds):
        return Sample(self.settings.out / "numbers.txt", "one, two, three")

    def rows(self):
        return {"numbers": f"{self.epoch} rows"}


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitems__(self, index):
        return self.rows[list(index)]


@pytest.fixture
def counting():
    register(Counting)
    yield
    del TASKS["counting"]


def settings(out, **options):
    return CountingSettings(("none",), out, hidden_size=16, batch_size=4, eval_every=20, save_every=20, **options)


@pytest.mark.usefixtures("counting")
def test_it_trains(tmp_path, capsys):
    whole = train(settings(tmp_path / "whole", steps=60, learning_rate=0.02), show=True)
    assert "64 rows" in capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    assert [line["rows"] for line in lines if "loss" in line] == [40, 80, 120, 160, 200, 240]
    assert whole.validation == min(x["validation_bits_per_number"] for x in lines if "validation_loss" in x)
    assert whole.validation < lines[0]["bits_per_number"]
    assert whole.sample.text == "one, two, three"
    saved = json.loads((tmp_path / "whole/settings.json").read_text())
    assert (saved["settings"]["task"], saved["settings"]["highest"], saved["numbers"]) == ("counting", 7, {"rows": 64})


@pytest.mark.usefixtures("counting")
def test_the_command_has_its_options():
    names = {p.name: p.default for p in command.parameters()}
    assert names["highest"] == 7
    assert "counting" in str(next(p.annotation for p in command.parameters() if p.name == "task"))


def test_the_settings_of_all_tasks_are_known_without_torch():
    """So a wrong option is refused in a moment."""
    code = "import sys, tarnn.cli.train; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_words_of_the_tasks():
    assert {name: task.model_type for name, task in TASKS.items()} == {
        "text": "tarnn",
        "image": "tarnn_image",
        "masked-lm": "tarnn",
        "classification": "tarnn",
        "ctc": "tarnn",
    }
    for name, task in TASKS.items():
        assert task_of({"model_type": task.model_type, "architectures": [task.architecture]}) is task
        assert task.architecture == task.classes()[1].__name__
        assert task.settings_class.task == name
        assert task.classes()[0].model_type == task.model_type
        assert not inspect.isabstract(task)
    assert task_of({"model_type": "gpt2"}) is None
    for names in (None, [], ["Other"], "TarnnForMaskedLM", [3]):
        assert task_of({"model_type": "tarnn", "architectures": names}) is TASKS["text"]
