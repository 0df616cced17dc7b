"""What `tarnn train` cannot do, it says in one sentence: the file or value, what was expected, what to do."""

import os
import re
import resource
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config

from tarnn.training.safe_trainer import SafeTrainer


def matches(sentence, *parts):
    """Every part is in the sentence, in this order."""
    return re.search(".*".join(re.escape(str(part)) for part in parts), sentence)


def test_text_that_is_not_there_or_not_enough(refused, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert matches(refused(source=empty), empty, "is empty; expected text")
    assert matches(
        refused(source=tmp_path / "gone.txt"), tmp_path / "gone.txt", "no such file or folder; expected a file"
    )
    short = tmp_path / "short.txt"
    short.write_text("only this")
    said = refused("--context", 64, "--val-fraction", 0, source=short, out=tmp_path / "short")
    assert matches(said, "has 10 tokens, fewer than one context of 64", "--context below 10")
    binary = tmp_path / "binary"
    binary.write_bytes(b"caf\xe9 " * 100)
    said = refused("--tokenizer", "bpe:300", source=binary, out=tmp_path / "binary-run")
    assert matches(said, binary, "is not UTF-8: byte 0xe9 at position 3", "--tokenizer bytes")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--context", "0"], ["--context 0 is not possible; expected 1 or more"]),
        (["--learning-rate", "-1"], ["--learning-rate -1.0", "above 0"]),
        (["--val-fraction", "1"], ["--val-fraction 1.0 is not possible", "below 1"]),
        (["--val", "x", "--val-fraction", "0.1"], ["--val", "--val-fraction", "give one of them"]),
        (["--resume", "--overwrite"], ["--resume", "--overwrite", "give one of them"]),
        (["--preset", "old"], ["--preset old", "modern or paper"]),
        (["--tokenizer", "bpe"], ["'bpe'", "'bpe:N'"]),
        (["--tokenizer", "bpe:100"], ["100", "at least 258"]),
        (["--hidden-size", "33"], ["hidden_size = 33", "num_attention_heads = 2"]),
        (
            ["--attention", "linear,quadratic"],
            ["attention", "gated_delta, linear, mamba2, none, rwkv7, softmax, window", "'quadratic'"],
        ),
        (["--map-option", "favor"], ["--map-option favor", "map.option=value"]),
        (["--map-option", "flavour.seed=1"], ["no feature map is called 'flavour'"]),
        (["--feature-map", "favor", "--map-option", "favor.features=3"], ["no option 'features'", "num_features"]),
        (["--feature-map", "cosformer"], ["'cosformer'", "max_position_embeddings"]),
        (["--set", "weight_decy=1"], ["weight_decy", "weight_decay"]),
        (["--set", "weight_decay=much"], ["weight_decay=much", "expected a number"]),
        (["--set", "weight_decay"], ["weight_decay", "--set key=value"]),
        (["--set", "disable_tqdm=false"], ["disable_tqdm", "leave it out"]),
        (["--set", "fsdp=true"], ["fsdp", "torchrun"]),
        (["--max-minutes", "1", "--set", "lr_scheduler_type=linear"], ["lr_scheduler_type", "--max-minutes"]),
        (["--set", "lr_scheduler_type=nonsense"], ["nonsense is not a valid SchedulerType"]),
        (["--set", "adam_beta1=7"], ["can't start with --set adam_beta1=7", "Invalid beta"]),
        (["--set", "per_device_eval_batch_size=2.5"], ["per_device_eval_batch_size=2.5", "whole number"]),
        (["--set", "dataloader_prefetch_factor=2"], ["dataloader_prefetch_factor"]),
        (["--set", "optim=galore_adamw"], ["refuses these settings"]),
        (["--set", "max_grad_norm=NaN"], ["max_grad_norm=nan", "at least 0"]),
        (["--set", 'lr_scheduler_kwargs={"x": 1}'], ["refuses these settings", "'x'"]),
        (["--set", "torch_compile=1"], ["torch_compile=1", "true or false"]),
        (["--set", "log_level_replica=loud"], ["can't start with --set log_level_replica=loud", "'loud'"]),
        (["--tokenizer", "bpe:99999999999999999999"], ["99999999999999999999 is too large", "at most 1,000,000"]),
        (["--layers", "1000000000"], ["--layers 1000000000", "10,000 or less"]),
        (["--hidden-size", "200000"], ["parameters need at least", "GB are free", "smaller --hidden-size"]),
        (["--batch-size", "1000000000"], ["tokens need at least", "GB are free", "smaller --batch-size"]),
        (["--batch-szie", "1"], ["--batch-szie", "tarnn train --help"]),
        (["--layers", "two"], ["--layers", "integer", "tarnn train --help"]),
    ],
)
def test_options_that_make_no_sense(refused, options, parts):
    assert matches(refused(*options), *parts)


@pytest.mark.parametrize(
    ("content", "options", "parts"),
    [
        ('{"hiden_size": 32}', [], ["'hiden_size'", "hidden_size"]),
        ('{"intermediate_size": "wide"}', [], ["intermediate_size", "wide"]),
        ('{"vocab_size": 50257}', [], ["vocab_size is 50257", "but 257 by the data"]),
        ('{"model_type": "gpt2"}', [], ["'gpt2'"]),
        ('{"max_position_embeddings": 8}', [], ["--context 16 is beyond the 8 positions"]),
        ("[1]", [], ["must hold a JSON object"]),
        ("{", [], ["is not JSON"]),
        pytest.param("[" * 100_000 + "]" * 100_000, [], ["is not JSON", "recursion"], id="deep"),
    ],
)
def test_model_configs_that_cannot_be(refused, tmp_path, content, options, parts):
    config = tmp_path / "model.json"
    config.write_text(content)
    said = refused("--config", config, *options)
    assert matches(said, *parts)
    if "max_position" not in content:
        assert str(config) in said


def test_a_config_that_is_not_there(refused, tmp_path):
    assert matches(refused("--config", tmp_path / "none.json"), tmp_path / "none.json", "can't be read: No such file")


def test_folders_that_hold_something_else(refused, train, tmp_path, text):
    run = tmp_path / "run"
    train("--steps", 4)
    before = (run / "model.safetensors").read_bytes()
    assert matches(refused(), run, "holds a run already", "--resume", "--overwrite", "another --out")
    said = refused("--resume", "--hidden-size", 64)
    assert matches(said, run, "--hidden-size was 32, is 64", "--overwrite")
    text.write_text(text.read_text() + "more")
    assert matches(refused("--resume"), text, "is no longer what the run in", run, "--overwrite")
    assert (run / "model.safetensors").read_bytes() == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    assert matches(refused("--overwrite", out=tmp_path / "mine"), "holds thesis.tex and no run", "another folder")
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert matches(refused(out=text), text, "is a file; expected a folder")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    assert matches(refused("--resume", out=tmp_path / "gpt2"), "no run", "another folder")
    (run / "settings.json").write_text("{")
    assert matches(refused("--resume"), run / "settings.json", "is not JSON", "intact copy")


def test_checkpoints_that_cannot_be_resumed(refused, train, tmp_path):
    train("--steps", 8)
    checkpoints = tmp_path / "run" / "checkpoints"
    last, older = checkpoints / "checkpoint-8", checkpoints / "checkpoint-4"
    whole = tmp_path / "whole"
    shutil.copytree(last, whole)

    def spoiled(name, spoil):
        shutil.rmtree(last)
        shutil.copytree(whole, last)
        spoil(last / name)
        return refused("--steps", 12, "--resume")

    size = (last / "model.safetensors").stat().st_size
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth"):
        said = spoiled(name, lambda path: os.truncate(path, path.stat().st_size // 2))
        assert matches(said, last / name, "bytes where", "Delete that folder", older)
    said = spoiled("model.safetensors", lambda path: os.truncate(path, 100))
    assert matches(said, "has 100 bytes where", f"{size:,}")
    assert matches(spoiled("optimizer.pt", lambda path: path.unlink()), last / "optimizer.pt", "is missing")
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"):
        said = spoiled(name, lambda path: path.write_bytes(b"\xfe" * path.stat().st_size))
        assert matches(said, last, "can't be read", "Delete that folder", older)

    assert matches(spoiled("complete.json", lambda path: path.write_text("{")), last, "can't be read")

    shutil.rmtree(older)
    said = spoiled("model.safetensors", lambda path: os.truncate(path, 100))
    assert matches(said, "There is no older one", "begin again")


def test_what_was_never_finished_is_not_picked_up(train, tmp_path):
    train("--steps", 4)
    checkpoints = tmp_path / "run" / "checkpoints"
    half = checkpoints / "checkpoint-999"
    shutil.copytree(checkpoints / "checkpoint-4", half)
    (half / "complete.json").unlink()
    code, _, stderr = train("--steps", 8, "--resume")
    assert (code, f"resuming from {checkpoints / 'checkpoint-4'}" in stderr) == (0, True)


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_a_loss_that_is_not_a_number_stops_before_the_weights_are_ruined(refused, train, tmp_path, monkeypatch, poison):
    compute_loss = SafeTrainer.compute_loss

    def poisoned(self, model, inputs, **kwargs):
        loss = compute_loss(self, model, inputs, **kwargs)
        if self.state.global_step < 6:
            return loss
        infinite = next(model.parameters()).sum() * 0  # with an infinite slope
        return loss * torch.nan if poison == "loss" else loss + infinite.sqrt()

    monkeypatch.setattr(SafeTrainer, "compute_loss", poisoned)
    said = refused()
    last = tmp_path / "run/checkpoints/checkpoint-4"
    what = "the loss is nan and the gradients are" if poison == "loss" else ": the gradients are"
    assert matches(said, "stopped after step 6", what, f"The last good checkpoint is {last}.", "--learning-rate")
    for folder in (last, tmp_path / "run"):
        assert all(tensor.isfinite().all() for tensor in load_file(folder / "model.safetensors").values())
    monkeypatch.undo()
    assert train("--resume", "--learning-rate", 1e-4)[0] == 0


def test_weights_that_are_no_numbers_are_never_saved(refused, tmp_path, monkeypatch):
    save = SafeTrainer._save_checkpoint

    def poisoned(self, model, trial):
        if self.state.global_step > 4:
            next(self.model.parameters()).data[0, 0] = torch.inf
        save(self, model, trial)

    monkeypatch.setattr(SafeTrainer, "_save_checkpoint", poisoned)
    assert matches(refused(), "after step 8", "weights are no longer finite", tmp_path / "run/checkpoints/checkpoint-4")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["checkpoint-4"]


def test_a_mixture_beyond_all_memory(refused, tmp_path):
    np.savez(tmp_path / "images.npz", images=np.zeros((20, 8, 8), np.uint8))
    options = ["--task", "image", "--hidden-size", 32, "--layers", 2, "--heads", 2, "--mixtures", 10**9]
    said = refused(*options, source=tmp_path / "images.npz", tiny=False)
    assert matches(said, "parameters need at least", "GB are free", "--mixtures")


def test_memory_that_runs_out_all_the_same_is_one_sentence(refused, train, tmp_path, monkeypatch):
    def poisoned(self, model, inputs, **kwargs):
        if self.state.global_step < 6:
            return compute_loss(self, model, inputs, **kwargs)
        return torch.zeros(10**17)

    compute_loss = SafeTrainer.compute_loss
    monkeypatch.setattr(SafeTrainer, "compute_loss", poisoned)
    last = tmp_path / "run/checkpoints/checkpoint-4"
    assert matches(refused(), "the memory is used up", f"The last good checkpoint is {last}.", "--batch-size")


def test_a_learning_rate_beyond_reason_ends_in_a_sentence(refused):
    said = refused("--learning-rate", 1e30)
    assert matches(said, "not finite", "A lower --learning-rate (it is 1e+30)")


@contextmanager
def room_for(num_bytes):
    """No file may grow beyond `num_bytes`: writing fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("limit", "writer"), [(1_000, "the ids"), (7_000, "tokenizers"), (100_000, "safetensors"), (200_000, "torch.save")]
)
def test_a_full_disk_leaves_the_last_good_checkpoint(refused, train, tmp_path, limit, writer):
    out = tmp_path / "run"
    first = writer in ("the ids", "tokenizers")
    if not first:
        train("--steps", 4)
    with room_for(limit):
        said = refused("--steps", 8, "--resume")
    last = out / "checkpoints/checkpoint-4"
    kept = "No checkpoint had been written yet." if first else f"The last good checkpoint is {last}."
    assert matches(said, f"writing to {out} failed", kept, "Make room", "--resume")
    assert first or [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-4"]
    assert train("--steps", 8, "--resume")[0] == 0
