"""Training a converted model: what is trained, that it helps, and that it goes on where it was stopped."""

import copy
import json
import math
import os
import signal
import sys

import pytest
import torch
from support.families import FAMILIES, model_of

from tarnn.conversion import convert, finetune, set_options
from tarnn.conversion.calibration import ExactKeys
from tarnn.conversion.distil import MapLosses
from tarnn.conversion.distil_trainer import DistillationTask
from tarnn.errors import UserError
from tarnn.training.callbacks import InterruptedRun
from tarnn.training.safe_trainer import SafeTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def texts():
    torch.manual_seed(1)
    return torch.randint(3, 99, (6, 40))


@pytest.fixture
def model(texts):
    made = model_of(FAMILIES["Llama"])
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if "q_proj" in key or "k_proj" in key:
                parameter.mul_(8)
    convert(made, texts, window=6, sinks=2, feature_map="hedgehog")
    return made


def weights_of(model):
    return {name: x.clone() for name, x in model.named_parameters()}


def test_stage_1_trains_maps_and_far_bias_alone(model, texts):
    set_options(model, mode="features")
    before, loss = weights_of(model), MapLosses(model, ExactKeys(6, 2))
    first = loss(texts)["loss"].item()
    finetune(model, texts, steps=30)
    assert loss(texts)["loss"].item() < first
    after = weights_of(model)
    assert all(torch.equal(x, after[name]) for name, x in before.items() if ".tarnn." not in name)
    assert not torch.equal(
        before["model.layers.0.self_attn.tarnn.far_bias"], after["model.layers.0.self_attn.tarnn.far_bias"]
    )


@pytest.mark.parametrize("train", ["lora", "weights"])
def test_stage_2_comes_closer_to_softmax(model, texts, train):
    if train == "lora":
        pytest.importorskip("peft")
    before = weights_of(model)
    report = finetune(
        model, texts, train=train, steps=12, learning_rate=3e-3, batch_size=2, drop_window=train == "weights"
    )
    after = weights_of(model)
    assert set(after) == set(before)
    assert not torch.equal(
        before["model.layers.0.self_attn.q_proj.weight"], after["model.layers.0.self_attn.q_proj.weight"]
    )
    assert report.unit == "nats per token"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("train", ["maps", "weights"])
def test_a_killed_training_goes_on_bit_for_bit(model, texts, tmp_path, monkeypatch, train):
    options = {"steps": 10, "train": train, "drop_window": train == "weights"}
    whole = copy.deepcopy(model)
    finetune(whole, texts, out=tmp_path / "whole", **options)
    assert (tmp_path / "whole" / "checkpoints" / "checkpoint-10" / "complete.json").is_file()
    step, killed = SafeTrainer.training_step, copy.deepcopy(model)

    def dies(self, *args):
        if self.state.global_step == 6:
            raise Killed
        return step(self, *args)

    monkeypatch.setattr(SafeTrainer, "training_step", dies)
    with pytest.raises(Killed):
        finetune(killed, texts, out=tmp_path / "cut", **options)
    monkeypatch.undo()
    finetune(model, texts, out=tmp_path / "cut", resume=True, **options)
    expected = weights_of(whole)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(model).items())
    logs = [[json.loads(x) for x in (tmp_path / n / "log.jsonl").read_text().splitlines()] for n in ("whole", "cut")]
    assert [x["loss"] for x in logs[0]] == [x["loss"] for x in logs[1]]


def test_a_signal_saves_and_stops(model, texts, tmp_path, monkeypatch):
    step = SafeTrainer.training_step

    def asked_to_stop(self, *args):
        if self.state.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(SafeTrainer, "training_step", asked_to_stop)
    with pytest.raises(InterruptedRun):
        finetune(model, texts, steps=10, out=tmp_path)
    assert (tmp_path / "checkpoints" / "checkpoint-4" / "complete.json").is_file()


def test_a_loss_that_is_not_finite_stops(model, texts, tmp_path, monkeypatch):
    monkeypatch.setattr(
        DistillationTask, "loss", lambda self, model, batch, count=None: model(**batch)["loss"] * math.nan
    )
    with pytest.raises(UserError, match="not finite"):
        finetune(model, texts, steps=3, out=tmp_path)


def test_refused(texts):
    with pytest.raises(ValueError, match="convert"):
        finetune(model_of(FAMILIES["Llama"]), texts)


OUT_OF_RANGE = {"steps": [0], "batch_size": [-3], "learning_rate": [float("nan"), -1.0, 0.0], "train": ["all"]}


def test_options_are_checked_before_any_work(model, texts, monkeypatch):
    monkeypatch.setattr(model, "forward", None)
    for option, values in OUT_OF_RANGE.items():
        for value in values:
            with pytest.raises(ValueError, match=option):
                finetune(model, texts, **{option: value})
    with pytest.raises(ValueError, match=r"window \+ sinks = 8 tokens.*got 8"):
        finetune(model, texts[:, :8])


def test_a_model_without_features_has_no_maps_to_train(texts):
    made = model_of(FAMILIES["Llama"])
    convert(made, texts, window=6, sinks=2, feature_map=None)
    with pytest.raises(ValueError, match="converted without features"):
        finetune(made, texts, steps=1)


def test_stage_1_calibrates_heads_that_had_no_features(model, texts, monkeypatch):
    """Their maps were not kept; they begin from calibrated ones, not from a draw."""
    convert(model, texts, window=6, sinks=2, feature_map={"name": "clusters", "num_features": 5}, mode="features")
    calibrated = {name: x.clone() for name, x in model.named_parameters() if "centres" in name}
    set_options(model, mode="window")
    monkeypatch.setattr(sys.modules["tarnn.conversion.finetune"], "distil", lambda *given: None)
    monkeypatch.setattr(sys.modules["tarnn.conversion.finetune"], "choose", lambda *given: [])
    finetune(model, texts, steps=1)
    found = dict(model.named_parameters())
    for name, x in calibrated.items():
        # of all but the last quarter of the texts, as `convert` took them
        torch.testing.assert_close(found[name], x)
