"""What `tarnn train` leaves behind, and that it is what it says."""

import io
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tarnn.models import TarnnForCausalLM
from tarnn.tasks import TextTask
from tarnn.tasks.text.corpus import load
from tarnn.training.safe_trainer import SafeTrainer


def log_of(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def model_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def nats_of(model, ids):
    """The cost of every id but the first, in windows of 16 that end where the text ends, in float64."""
    model, total = model.double(), 0.0
    for start in range(0, len(ids) - 1, 16):
        new = min(16, len(ids) - 1 - start)
        window = torch.from_numpy(ids[start + new - 16 : start + new + 1].astype(np.int64))
        logits = model(input_ids=window[None, :-1]).logits[0, -new:]
        total += torch.nn.functional.cross_entropy(logits, window[-new:], reduction="sum").item()
    return total


def test_a_run_and_all_that_it_writes(train, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("there is no network here"))
    out = tmp_path / "run"
    code, stdout, stderr = train("--sample-tokens", 20)
    assert code == 0
    for resolved in ("12 steps", "batch 2 × context 16", "2 layers, hidden 32", "seed 0"):
        assert resolved in stderr
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"checkpoint-8", "checkpoint-12"}
    sample, tokens = (out / "sample.txt").read_text(), (tmp_path / "text.txt").read_bytes()
    assert stdout.startswith(sample)
    held_out = tokens[len(tokens) - round(len(tokens) * 0.1) :]
    assert sample.startswith(held_out[:32].decode())  # a model that has hardly seen a separator does not start from one
    assert len(sample) > 32
    for name in ("log.jsonl", "settings.json"):
        assert str(out / name) in stdout
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["settings"]["context"], settings["run"]["tokens_per_step"]) == (16, 32)
    assert settings["model"]["hidden_size"] == 32
    assert settings["versions"]["torch"] == torch.__version__

    lines = log_of(out)
    assert [line["step"] for line in lines] == [4, 4, 8, 8, 12, 12]
    assert [line["tokens"] for line in lines if "loss" in line] == [128, 256, 384]
    assert lines[-2]["loss"] < lines[0]["loss"]
    for line in lines:  # bytes are tokens, but for one separator
        if "loss" in line:
            assert line["bits_per_byte"] == pytest.approx(line["loss"] / math.log(2), rel=1e-3)

    best = min((line for line in lines if "validation_loss" in line), key=lambda line: line["validation_loss"])
    corpus = load(out / "data")
    nats = nats_of(model_of(out), corpus.validation)
    num_bytes = sum(len(bytes([i])) for i in corpus.validation[1:] if i < 256)
    assert best["validation_bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2), rel=1e-5)
    assert best["validation_perplexity"] == pytest.approx(math.exp(nats / (len(corpus.validation) - 1)), rel=1e-5)
    assert f"{best['validation_bits_per_byte']:.4f} bits/byte" in stdout
    assert AutoTokenizer.from_pretrained(out).decode([104, 105]) == "hi"


@pytest.fixture
def worse_after(monkeypatch):
    """worse_after(step): from then on every evaluation is worse than any before."""
    evaluate = SafeTrainer.evaluate

    def install(step):
        def worse(self, *args, **kwargs):
            metrics = evaluate(self, *args, **kwargs)
            metrics["eval_measure"] += self.state.global_step > step
            return metrics

        monkeypatch.setattr(SafeTrainer, "evaluate", worse)

    return install


def test_a_sample_that_fails_fails_no_run(train, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise TypeError("forward() has no argument 'cache'")

    monkeypatch.setattr(TarnnForCausalLM, "generate", fail)
    run = tmp_path / "run"
    for options in ((), ("--resume",)):
        code, out, err = train(*options)
        assert (code, "Traceback" in err) == (0, False), err
        assert "made no sample (TypeError: forward() has no argument 'cache')" in err
        assert "next  tarnn generate" in out
    AutoModelForCausalLM.from_pretrained(run)
    assert train("--from", run, "--steps", 2, out=tmp_path / "more", tiny=False)[0] == 0
    monkeypatch.setenv("TARNN_TRACEBACK", "1")
    with pytest.raises(TypeError):
        train("--resume")


def test_the_best_model_is_kept_not_the_last(train, tmp_path, worse_after):
    worse_after(8)
    code, stdout, _ = train("--keep", 1)
    assert (code, "(step 8)" in stdout) == (0, True)
    out = tmp_path / "run"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-12"]
    marker = json.loads((out / "checkpoints/checkpoint-12/complete.json").read_text())
    assert (marker["best_step"], marker["step"]) == (8, 12)
    last = (out / "checkpoints/checkpoint-12/model.safetensors").read_bytes()
    assert (out / "model.safetensors").read_bytes() != last


def test_a_resumed_run_remembers_its_best_and_its_time(train, tmp_path, worse_after):
    out = tmp_path / "run"
    train("--steps", 4)
    marker = out / "checkpoints/checkpoint-4/complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"seconds": 1000}))
    best = (out / "model.safetensors").read_bytes()
    worse_after(4)
    code, stdout, _ = train("--steps", 8, "--resume")
    assert (code, "(step 4)" in stdout) == (0, True)
    assert (out / "model.safetensors").read_bytes() == best
    assert 1000 < log_of(out)[-1]["seconds"] < 1100


def test_without_validation_the_latest_model_is_kept(train, tmp_path):
    code, stdout, stderr = train("--val-fraction", 0)
    assert code == 0
    assert "no validation text" in stdout
    assert "none: the latest model is kept" in stderr
    out = tmp_path / "run"
    assert (out / "model.safetensors").read_bytes() == (
        out / "checkpoints/checkpoint-12/model.safetensors"
    ).read_bytes()


def test_bpe_jsonl_and_a_validation_file_of_its_own(train, text, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": line}) + "\n" for line in text.read_text().splitlines()))
    held_out = tmp_path / "held out.txt"
    held_out.write_text("the cat sat on the mat. " * 20)
    code, _, _ = train("--text-field", "body", "--tokenizer", "bpe:265", "--val", held_out, source=rows)
    assert code == 0
    corpus = load(tmp_path / "run" / "data")
    assert len(corpus.tokenizer) == model_of(tmp_path / "run").config.vocab_size == 265
    assert (corpus.train == 264).sum() == len(text.read_text().splitlines())
    assert corpus.facts["validation"]["bytes"] == 24 * 20
    line = log_of(tmp_path / "run")[-1]
    tokens, num_bytes = len(corpus.validation) - 1, 24 * 20 - corpus.bytes_per_id[corpus.validation[0]]
    assert line["validation_bits_per_byte"] == pytest.approx(line["validation_loss"] * tokens / num_bytes / math.log(2))


def test_standard_input_and_any_bytes(train, tmp_path, monkeypatch):
    data = random.Random(1).randbytes(2000)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert train("--steps", 2, source="-")[0] == 0
    corpus = load(tmp_path / "run" / "data")
    assert bytes([*corpus.train, *corpus.validation[:-1]]) == data


def test_epochs_end_a_run(train, tmp_path):
    code, stdout, _ = train("--steps", 1000, "--epochs", 0.05, "--val-fraction", 0)
    tokens = len(load(tmp_path / "run" / "data").train)
    assert (code, f"\n{math.ceil(0.05 * tokens / 32)} steps in" in stdout) == (0, True)


def test_minutes_are_those_of_the_whole_command_and_the_learning_rate_follows_the_clock(train, tmp_path, monkeypatch):
    """With data that are slow to read, a validation that alone would take half a minute, and a slow sample: by a clock that
    goes on by what each of them is said to take, and a little whenever it is read."""
    out, limit, now = tmp_path / "run", 8, [0.0]  # seconds

    def clock():
        now[0] += 0.001
        return now[0]

    def slower(name, seconds):
        do = getattr(TextTask, name)

        def slow(self, *args, **kwargs):
            now[0] += seconds
            return do(self, *args, **kwargs)

        monkeypatch.setattr(TextTask, name, slow)

    slower("__init__", 2.0)
    slower("loss", 0.02)
    slower("outcome", 0.25)
    for name in ("monotonic", "perf_counter", "time"):
        monkeypatch.setattr(time, name, clock)
    options = ("--steps", 10**6, "--max-minutes", limit / 60, "--eval-every", 20, "--sample-tokens", 10**5)
    options += ("--save-every", 100_003, "--val-fraction", 0.5)  # prime: each step is logged
    code, stdout, stderr = train(*options)
    assert 0.75 * limit < now[0] < 1.1 * limit
    assert code == 0
    assert re.search(r"validation: 1 of \d+ batches, so that", stderr)
    lines = [line for line in log_of(out) if "loss" in line]
    rates = [line["learning_rate"] / 1e-3 for line in lines]
    top = max(range(len(rates)), key=rates.__getitem__)
    assert rates[top] > 0.9
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[-1] < 0.3
    validations = [line for line in log_of(out) if "validation_loss" in line]
    last = lines[-1]["step"]
    assert validations[-1]["step"] == last
    assert (out / "checkpoints" / f"checkpoint-{last}" / "complete.json").exists()
    before = (out / "log.jsonl").read_bytes()
    code, stdout, _ = train(*options, "--resume", "--sample-tokens", 4)
    assert (code, f"{last:,} steps" in stdout) == (0, True)  # its time is over: nothing is added
    assert (out / "log.jsonl").read_bytes() == before


def test_the_model_is_what_preset_file_and_options_say(train, tmp_path):
    config = tmp_path / "model.json"
    config.write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 4, "decay": "head", "dropout": 0.25}))
    code, _, _ = train(
        "--config",
        config,
        "--attention",
        "linear,softmax",
        "--feature-map",
        "relu",
        "--layers",
        4,
        "--steps",
        1,
        "--hidden-size",
        32,
    )
    assert code == 0
    made = model_of(tmp_path / "run").config
    assert (made.hidden_size, made.num_hidden_layers, made.decay, made.dropout) == (32, 4, "head", 0.25)
    assert (made.attention, made.feature_map) == (["linear", "softmax"], "relu")

    options = ("--preset", "paper", "--steps", 1, "--gradient-checkpointing", "--bf16", "--sample-tokens", 0)
    assert train(*options, out=tmp_path / "paper")[0] == 0
    made = model_of(tmp_path / "paper").config
    assert (made.norm_position, made.hidden_size, made.num_hidden_layers) == ("post", 32, 2)


RANDOM = (
    "--feature-map", "favor,elu", "--map-option", "favor.num_features=8", "--map-option", "favor.centre=true",
    "--redraw-every", 4,
)  # fmt: skip


def test_random_features_are_redrawn_and_a_resumed_run_sees_the_same_draws(train, tmp_path):
    """As if nothing had happened, to the bit: draws, calibrations, losses, weights."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    code, _, stderr = train(*RANDOM, "--seed", 3, "--dropout", 0.1, out=whole)
    assert code == 0
    assert "redraw  every 4 steps" in stderr
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "checkpoint-12")
    assert train(*RANDOM, "--seed", 3, "--dropout", 0.1, "--resume", out=resumed)[0] == 0
    timeless = lambda run: [{k: x for k, x in line.items() if k != "seconds"} for line in log_of(run)]  # noqa: E731
    assert timeless(whole) == timeless(resumed)
    states = [model_of(run / "checkpoints" / "checkpoint-12").state_dict() for run in (whole, resumed)]
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())
    (phi,) = (x for x in model_of(whole / "checkpoints" / "checkpoint-12").modules() if hasattr(x, "omega"))
    assert (int(phi.seed), int(phi.draw)) == (300_000, 2)  # steps 9 … 12 are those of the draw after step 8
    centre = next(x for name, x in states[0].items() if name.endswith("key_centre"))
    assert (centre != 0).all()
    settings = json.loads((whole / "settings.json").read_text())
    options = {"num_features": 8, "centre": True, "seed": 3}
    assert settings["model"]["feature_map_options"] == {"favor": options}


def test_gradient_checkpointing_and_accumulation_change_no_losses(train, tmp_path):
    train("--batch-size", 4, out=tmp_path / "plain")
    train("--batch-size", 4, "--gradient-checkpointing", out=tmp_path / "checkpointed")
    train("--batch-size", 1, "--accumulate", 4, out=tmp_path / "accumulated")
    losses = {
        run: [line.get("loss", 0) for line in log_of(tmp_path / run)]
        for run in ("plain", "checkpointed", "accumulated")
    }
    assert losses["checkpointed"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["accumulated"] == pytest.approx(losses["plain"], rel=1e-5)


def test_set_reaches_the_trainer(train, tmp_path):
    options = ("--set", "lr_scheduler_type=constant", "--set", "warmup_steps=0", "--set", "max_grad_norm=0")
    code, _, stderr = train(*options)
    assert code == 0
    assert "set lr_scheduler_type" in stderr
    assert "learning rate  0.001, constant\n" in stderr
    assert {line["learning_rate"] for line in log_of(tmp_path / "run") if "loss" in line} == {1e-3}


def test_a_resumed_run_may_go_on_longer_and_slower(train, tmp_path):
    assert train("--steps", 4)[0] == 0
    first = log_of(tmp_path / "run")
    code, _, stderr = train("--steps", 8, "--learning-rate", 5e-4, "--eval-every", 3, "--resume")
    assert code == 0
    assert f"resuming from {tmp_path / 'run' / 'checkpoints' / 'checkpoint-4'}" in stderr
    lines = log_of(tmp_path / "run")
    assert lines[:2] == first
    assert [line["step"] for line in lines] == [4, 4, 6, 8, 8]
    cosine_at_7_of_8 = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 6 / 7))  # after a step of warm-up
    assert lines[3]["learning_rate"] == pytest.approx(5e-4 * cosine_at_7_of_8)


@pytest.fixture
def signal_at(monkeypatch):
    """signal_at(step, *numbers): in that step, this process gets these signals."""
    compute_loss = SafeTrainer.compute_loss

    def install(step, *numbers):
        def hit(self, model, inputs, **kwargs):
            if self.state.global_step == step:
                for number in numbers:
                    os.kill(os.getpid(), number)
            return compute_loss(self, model, inputs, **kwargs)

        monkeypatch.setattr(SafeTrainer, "compute_loss", hit)

    # a shell that runs this in the background has SIGINT ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield install
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler, "the run gives back what was there"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_run_goes_on_as_if_nothing_had_happened(
    train, tmp_path, signal_at, monkeypatch, number
):
    """Before the first --save-every, too; and the model so far is there to be used."""
    train("--dropout", 0.1, "--save-every", 100, out=tmp_path / "whole")
    signal_at(1, number)
    code, _, stderr = train("--dropout", 0.1, "--save-every", 100)
    out = tmp_path / "run"
    assert code == 128 + number
    assert "stopped after step 2, saved; the same command with --resume goes on\n" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["checkpoint-2"]
    assert model_of(out).config.hidden_size == 32
    monkeypatch.undo()
    assert train("--dropout", 0.1, "--save-every", 100, "--resume")[0] == 0
    last = "checkpoints/checkpoint-12/model.safetensors"
    assert (out / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_a_second_control_c_ends_at_once(train, tmp_path, signal_at):
    signal_at(6, signal.SIGINT, signal.SIGINT)
    code, _, stderr = train()
    assert code == 130
    assert f"tarnn: --resume goes on from {tmp_path / 'run/checkpoints/checkpoint-4'}\n" in stderr
    assert stderr.endswith("tarnn: interrupted\n")
    assert not (tmp_path / "run/checkpoints/checkpoint-7").exists()


def test_a_signal_in_a_validation_ends_it(train, tmp_path, monkeypatch):
    outcome, calls = TextTask.outcome, []

    def hit(self, *args):
        calls.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        return outcome(self, *args)

    monkeypatch.setattr(TextTask, "outcome", hit)
    assert train()[0] == 143
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["checkpoint-4"]
    assert not [line for line in log_of(tmp_path / "run") if "validation_loss" in line]


def test_two_runs_do_not_share_a_folder(train, tmp_path):
    """The lock is the process's: it is gone when that is, and the file that stays behind is no lock."""
    out = tmp_path / "run"
    code = "import sys, time; from pathlib import Path; from tarnn.training.folder import locked\n"
    code += "with locked(Path(sys.argv[1])): print('mine', flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "mine\n"
        for options in ([], ["--overwrite"], ["--resume"]):
            said = train(*options)
            assert said[0] == 2
            assert f"another run is training into {out} (process {other.pid}, since 20" in said[2]
            assert "name another folder with --out" in said[2]
        other.kill()
    assert train("--steps", 2)[0] == 0
    assert train("--steps", 4, "--resume")[0] == 0


def test_a_short_run_reports_its_loss_and_its_speed(train, tmp_path):
    _, _, stderr = train("--steps", 3, "--save-every", 100)
    assert re.search(r"100 %  step 3  \d\.\d+ bits/byte  [\d,]+ tokens/s  0:\d\d done", stderr)
    assert [line["step"] for line in log_of(tmp_path / "run") if "loss" in line] == [3]


def test_overwrite_begins_anew_and_leaves_alone_what_is_not_of_the_run(train, tmp_path):
    train("--steps", 4)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    code, _, _ = train("--steps", 4, "--seed", 1, "--overwrite")
    assert code == 0
    assert [line["step"] for line in log_of(tmp_path / "run")] == [4, 4]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["settings"]["seed"] == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # torch's own, of its parts
def test_a_compiled_model_learns_what_a_plain_one_does(train, tmp_path):
    """By inductor, forward and backward, as --set torch_compile=true asks the Trainer to."""
    options = ("--layers", 1, "--steps", 4, "--save-every", 1, "--val-fraction", 0, "--sample-tokens", 0)
    for out, more in (("plain", ()), ("compiled", ("--set", "torch_compile=true"))):
        code, _, stderr = train(*options, *more, out=tmp_path / out)
        assert code == 0, stderr
    plain, compiled = ([line["loss"] for line in log_of(tmp_path / out)] for out in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert plain[-1] != plain[0]
