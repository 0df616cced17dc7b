"""Speech recognition with CTC: table 3 of "Transformers are RNNs" in small, on AN4 and on spoken digits.

    python experiments/speech.py --data FOLDER          # killed, it goes on
    python experiments/speech.py --data FOLDER --quick

Linear attention, softmax attention and a bidirectional LSTM read frames of sound and write letters or phones; a causal
linear model, which can transcribe a stream, stands beside them. As in the paper: the error rate on held-out data, and the time
per epoch. The Transformers differ in their attention only; the LSTM has as many layers and about as many parameters.

FOLDER holds an4 (cepstra, 13 per frame, of 948 utterances; the phones are those of its dictionary) and fsdd (wav files of
spoken digits, read as log-mel frames and written as letters: "SEVEN"). Each task's test data are its own.
Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.3.
"""

import io
import json
import random
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.pronunciations import phones_of, read_pronunciations

from scripts.common.loop import train
from scripts.common.options import as_facts, parse
from scripts.common.plots import BLUE, GREEN, RED, SKY, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.models import SpeechFeatures, TarnnConfig, TarnnForCTC
from tarnn.tasks.speech.audio import read_wav
from tarnn.tasks.speech.ctc import beam_search, best_path, error_rate, places_needed
from tarnn.tasks.speech.task import padded, symbols_tokenizer
from tarnn.tasks.speech.transcripts import LETTERS, Symbols, letters_of

METHODS = {"linear": BLUE, "softmax": RED, "bi-LSTM": GREEN, "linear, causal": SKY}


class Task(NamedTuple):
    subsampling: int  # frames of 10 ms per place
    epochs: int


TASKS = {"an4 phones": Task(4, 30), "fsdd letters": Task(2, 12), "an4 letters": Task(4, 15)}
FULL = {
    "epochs": int,
    "batch_size": 8,
    "hidden_size": 96,
    "layers": 3,
    "heads": 4,
    "learning_rate": 4e-3,
    "utterances": int,
    "beam": 16,
    "data": Path,
    "runs": Path("runs/speech"),
}
QUICK = {"epochs": 2, "batch_size": 4, "hidden_size": 32, "layers": 1, "heads": 2, "utterances": 12, "beam": 4}
PARTS = ["errors", "epoch"]
PAPER = {"bi-LSTM": (10.94, 1047), "softmax": (5.12, 2711), "linear": (8.08, 824)}  # PER, seconds per epoch
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


class Utterance(NamedTuple):
    frames: np.ndarray  # (t, n) float32
    ids: np.ndarray  # of its symbols
    place: str  # for messages

    @property
    def row(self) -> dict[str, np.ndarray]:
        """As a model's arguments are called."""
        return {"input_features": self.frames, "labels": self.ids}


class Data(NamedTuple):
    train: list[Utterance]
    test: list[Utterance]
    symbols: Symbols
    front: SpeechFeatures | None  # what made the frames of sound, where that is at hand
    subsampling: int = 1


class Lstm(nn.Module):
    """The paper's baseline: a bidirectional LSTM under the same reading of frames and the same output."""

    def __init__(self, input_size: int, hidden_size: int, layers: int, symbols: int, subsampling: int):
        super().__init__()
        self.subsampling = subsampling
        self.lstm = nn.LSTM(
            input_size * subsampling,
            hidden_size,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=0.1 if layers > 1 else 0.0,
        )
        self.head = nn.Linear(2 * hidden_size, symbols)

    def forward(self, input_features: Tensor, attention_mask: Tensor, labels: Tensor) -> CausalLMOutput:
        """As `TarnnForCTC` has it; the blank is number 0."""
        lengths, s = attention_mask.sum(-1), self.subsampling
        frames = nn.functional.pad(input_features, (0, 0, 0, -input_features.shape[1] % s))
        packed = nn.utils.rnn.pack_padded_sequence(
            frames.unflatten(1, (-1, s)).flatten(2), places := -(-lengths // s), batch_first=True, enforce_sorted=False
        )
        logits = self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])
        loss = nn.functional.ctc_loss(
            logits.log_softmax(-1).transpose(0, 1), labels[labels >= 0], places, (labels >= 0).sum(-1)
        )
        return CausalLMOutput(loss=loss, logits=logits)


def main() -> int:
    lists = {"tasks": list(TASKS), "methods": list(METHODS), "parts": PARTS}
    about = {
        "data": "the folder with an4 and fsdd",
        "runs": "where the runs are kept",
        "epochs": "by default each task's own",
    }
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, results=earlier(options), report=report, figure=figure)


def earlier(options) -> dict[str, Any]:
    """What runs with the same settings left of other tasks and methods."""
    path, other = options.out / "speech.json", ("tasks", "methods", "parts")
    if path.exists():
        data, settings = json.loads(path.read_text()), as_facts(options)
        if all(data["settings"].get(name) == value for name, value in settings.items() if name not in other):
            return data["results"]
    return {"errors": {}, "epoch": {}}


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the recordings are.")
    for name in options.tasks:
        data = read(name, options)
        for method in options.methods if "errors" in options.parts else []:
            results["errors"].setdefault(name, {})[method] = trained(name, method, data, options)
            keep()
        if "epoch" in options.parts:
            results["epoch"].setdefault(name, {}).update(epochs_in_turns(data, options))


def read(name: str, options) -> Data:
    """Normalised frames and symbols of all utterances, or of the first few."""
    if name.startswith("an4"):
        data = an4(options.data / "an4", phones=name.endswith("phones"), most=options.utterances)
    else:
        data = fsdd(options.data / "fsdd" / "recordings.zip", most=options.utterances)
    every = np.concatenate([x.frames for x in data.train])
    mean, std = every.mean(0), every.std(0)
    if data.front is not None:
        data.front.mean, data.front.std = mean.tolist(), std.tolist()
    for x in data.train:
        check_room(x, TASKS[name].subsampling)
    parts = [[x._replace(frames=(x.frames - mean) / std) for x in part] for part in data[:2]]
    return Data(*parts, data.symbols, data.front, TASKS[name].subsampling)


def an4(folder: Path, *, phones: bool, most: int | None) -> Data:
    words = read_pronunciations(folder / "an4.dic")
    names = tuple((folder / "an4.phone").read_text().split()) if phones else LETTERS
    symbols, parts = Symbols(names), []
    for part in ("train", "test"):
        file = np.load(folder / f"{part}.npz")
        features, bounds, some = file["features"], file["offsets"], []
        for i, (who, text) in enumerate(zip(file["ids"][:most], file["text"])):
            place = f"{folder / part}.npz, utterance {who}"
            said = phones_of(str(text), words, place) if phones else letters_of(str(text))
            frames = features[bounds[i] : bounds[i + 1]].astype(np.float32)
            some.append(Utterance(frames, symbols.ids(said, place), place))
        parts.append(some)
    return Data(*parts, symbols, None)


def fsdd(path: Path, *, most: int | None) -> Data:
    front, symbols = SpeechFeatures(40, 8000, high=4000.0), Symbols(LETTERS)
    parts: tuple[list[Utterance], list[Utterance]] = ([], [])
    with zipfile.ZipFile(path) as archive:
        names = sorted(archive.namelist())
        random.Random(0).shuffle(names)  # so that the first few are of all digits and speakers
        for name in names:
            digit, _, index = name.removesuffix(".wav").split("_")
            samples, rate = read_wav(f"{path}/{name}", io.BytesIO(archive.read(name)))
            front.check(samples, rate, f"{path}/{name}")
            part = parts[int(index) < 5]  # the official split
            if most is None or len(part) < most:
                ids = symbols.ids(DIGITS[int(digit)], name)
                part.append(Utterance(front.frames(samples), ids, f"{path}/{name}"))
    return Data(*parts, symbols, front)


def check_room(x: Utterance, subsampling: int) -> None:
    """Else no path spells the symbols, and the loss is infinite."""
    places, needed = -(-len(x.frames) // subsampling), places_needed(x.ids)
    if places < needed:
        raise Unmeasured(f"{x.place} has {places} places for {needed} symbols.")


def build(method: str, data: Data, options) -> nn.Module:
    torch.manual_seed(0)
    size, number = data.train[0].frames.shape[1], len(data.symbols.names) + 1
    if method == "bi-LSTM":
        return Lstm(size, 3 * options.hidden_size // 4, options.layers, number, data.subsampling)
    config = TarnnConfig(
        vocab_size=number,
        pad_token_id=0,
        input_size=size,
        subsampling=data.subsampling,
        dropout=0.1,
        hidden_size=options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        attention=method.split(",")[0],
        causal="causal" in method,
        decay="token" if "causal" in method else "none",
    )
    return TarnnForCTC(config)


def trained(name: str, method: str, data: Data, options) -> dict[str, Any]:
    """One run, from where it was stopped."""
    model, epochs = build(method, data, options), options.epochs or TASKS[name].epochs
    folder = options.runs / f"{name}_{method}".replace(" ", "_").replace(",", "")
    rows, batches = padded([x.row for x in data.train]), batches_of(data, options)

    def loss(model: nn.Module, step: int) -> Tensor:
        epoch, place = divmod(step, len(batches))
        order = np.random.default_rng(epoch).permutation(len(batches))
        return model(**rows.__getitems__(batches[order[place]])).loss

    done = train(
        folder,
        model,
        loss,
        epochs * len(batches),
        every=len(batches) * max(1, epochs // 6),
        learning_rate=options.learning_rate,
        measure=lambda model: {"error": errors(model, data, options)},
    )
    if isinstance(model, TarnnForCTC) and data.front is not None:
        save(model, data, folder / "model")
    return {
        "error": done.curve[-1]["error"],
        "beam": errors(model, data, options, beam=True),
        "seconds_an_epoch": done.seconds / done.step * len(batches),
        "parameters": sum(x.numel() for x in model.parameters()),
        "epochs": done.step // len(batches),
        "curve": done.curve,
    }


def batches_of(data: Data, options) -> list[list[int]]:
    """Of utterances of similar length."""
    order = sorted(range(len(data.train)), key=lambda i: len(data.train[i].frames))
    return [order[i : i + options.batch_size] for i in range(0, len(order), options.batch_size)]


@torch.no_grad()
def errors(model: nn.Module, data: Data, options, *, beam: bool = False) -> float:
    """Edits per symbol of the test utterances, in per cent."""
    rows, size, pairs = padded([x.row for x in data.test]), options.batch_size, []
    for start in range(0, len(data.test), size):
        some = data.test[start : start + size]
        logits = model(**rows.__getitems__(range(start, start + len(some)))).logits.double()
        for x, row in zip(some, logits):
            row = row[: -(-len(x.frames) // data.subsampling)]
            found = beam_search(row.log_softmax(-1).numpy(), options.beam) if beam else best_path(row.numpy())
            pairs.append((found, x.ids.tolist()))
    return error_rate(pairs)


def epochs_in_turns(data: Data, options) -> dict[str, float]:
    """Seconds of one epoch (forward, backward), by method; they take turns, batch by batch."""
    models = {method: build(method, data, options).train() for method in options.methods}
    rows, seconds = padded([x.row for x in data.train]), dict.fromkeys(models, 0.0)
    for batch in batches_of(data, options):
        given = rows.__getitems__(batch)
        for method, model in models.items():
            begun = time.perf_counter()
            model(**given).loss.backward()
            model.zero_grad()
            seconds[method] += time.perf_counter() - begun
    return seconds


def save(model: TarnnForCTC, data: Data, folder: Path) -> None:
    """A checkpoint for `tarnn transcribe`: the model, its front end, its tokenizer."""
    model.save_pretrained(folder)
    assert data.front is not None
    data.front.save_pretrained(folder)
    symbols_tokenizer(folder, data.symbols.names).save_pretrained(folder)


def report(options, facts, results: dict[str, Any]) -> str:
    rows = []
    for name, found in results["errors"].items():
        for method, one in found.items():
            paper = PAPER.get(method, (None, None)) if name == "an4 phones" else (None, None)
            epoch = results["epoch"].get(name, {}).get(method)
            rows.append(
                [
                    name,
                    method,
                    f"{one['error']:.1f}",
                    f"{one['beam']:.1f}",
                    one["epochs"],
                    epoch and f"{epoch:.1f}",
                    f"{one['parameters']:,}",
                    *paper,
                ]
            )
    header = [
        "task",
        "method",
        "error",
        "beam",
        "epochs",
        "s per epoch",
        "parameters",
        "paper: PER",
        "paper: s per epoch",
    ]
    return page(
        "Speech recognition with CTC, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, batches of {options.batch_size}. Error: "
        f"edits per letter or phone, in per cent, of test utterances, by the most likely path and by a beam of {options.beam}; "
        "seconds of one epoch's forward and backward passes, the methods in turns. The paper's columns are of WSJ (80 hours, "
        "9 layers, a GPU). One run each.",
        markdown(header, rows, left=2),
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(max(1, len(results["errors"])))
    for axes, (name, found) in zip(every, results["errors"].items()):
        for method, one in found.items():
            line(axes, [(x["step"], x["error"]) for x in one["curve"]], METHODS[method], method)
        label(axes, "steps", "edits per symbol, %", scales="linear linear", title=name, legend="")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
