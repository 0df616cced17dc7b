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
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pad_sequence
from transformers import Wav2Vec2CTCTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.loop import train
from scripts.common.options import parse
from scripts.common.plots import BLUE, GREEN, RED, SKY, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.data.audio import SpeechFeatures, read_wav
from tarnn.data.ctc import beam_search, best_path, error_rate
from tarnn.data.transcripts import BLANK, LETTERS, SPACE, Symbols, letters_of, phones_of, read_pronunciations
from tarnn.models import TarnnConfig, TarnnForCTC

METHODS = {"linear": BLUE, "softmax": RED, "bi-LSTM": GREEN, "linear, causal": SKY}
TASKS = ["an4 phones", "fsdd letters", "an4 letters"]
FULL = {
    "epochs": 12, "batch_size": 16, "hidden_size": 64, "layers": 2, "heads": 4, "subsampling": 2, "learning_rate": 3e-3,
    "utterances": 1500, "beam": 16, "data": Path, "runs": Path("runs/speech"),
}  # fmt: skip
QUICK = {
    "epochs": 2,
    "batch_size": 4,
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "utterances": 12,
    "beam": 4,
}
PAPER = {"bi-LSTM": (10.94, 1047), "softmax": (5.12, 2711), "linear": (8.08, 824)}  # PER, seconds per epoch
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")


class Utterance(NamedTuple):
    frames: np.ndarray  # (t, n) float32
    ids: np.ndarray  # of its symbols
    place: str  # for messages


class Data(NamedTuple):
    train: list[Utterance]
    test: list[Utterance]
    symbols: Symbols
    front: SpeechFeatures | None  # what made the frames of sound, where that is at hand


class Lstm(nn.Module):
    """The paper's baseline: a bidirectional LSTM under the same reading of frames and the same output."""

    def __init__(self, input_size: int, hidden_size: int, layers: int, symbols: int, subsampling: int):
        super().__init__()
        self.subsampling = subsampling
        self.lstm = nn.LSTM(
            input_size * subsampling, hidden_size, layers, batch_first=True, bidirectional=True
        )
        self.head = nn.Linear(2 * hidden_size, symbols)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        frames = nn.functional.pad(frames, (0, 0, 0, -frames.shape[1] % self.subsampling))
        x = frames.unflatten(1, (-1, self.subsampling)).flatten(2)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def main() -> int:
    lists = {"tasks": TASKS, "methods": list(METHODS)}
    about = {"data": "the folder with an4 and fsdd", "runs": "where the runs are kept"}
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the recordings are.")
    for name in options.tasks:
        data = read(name, options)
        for method in options.methods:
            results.setdefault(name, {})[method] = trained(name, method, data, options)
            keep()


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
        check_room(x, options.subsampling)
    parts = [[x._replace(frames=(x.frames - mean) / std) for x in part] for part in data[:2]]
    return Data(*parts, *data[2:])


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
    """Each symbol needs a place, and a blank between two that are alike; else no path spells them, and the loss is infinite."""
    places, needed = -(-len(x.frames) // subsampling), len(x.ids) + int((x.ids[1:] == x.ids[:-1]).sum())
    if places < needed:
        raise Unmeasured(f"{x.place} has {places} places for {needed} symbols; lower --subsampling.")


def build(method: str, data: Data, options) -> nn.Module:
    torch.manual_seed(0)
    size, number = data.train[0].frames.shape[1], len(data.symbols.names) + 1
    if method == "bi-LSTM":
        return Lstm(size, options.hidden_size, options.layers, number, options.subsampling)
    config = TarnnConfig(
        vocab_size=number, pad_token_id=0, input_size=size, subsampling=options.subsampling, dropout=0.1,
        hidden_size=options.hidden_size, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        attention=method.split(",")[0], causal="causal" in method,
        decay="token" if "causal" in method else "none",
    )  # fmt: skip
    return TarnnForCTC(config)


def logits_of(model: nn.Module, rows: list[Utterance]) -> tuple[Tensor, Tensor]:
    """(logits (b, places, symbols), how many places each row has)."""
    lengths = torch.tensor([len(x.frames) for x in rows])
    frames = pad_sequence([torch.from_numpy(x.frames) for x in rows], batch_first=True)
    if isinstance(model, TarnnForCTC):
        mask = torch.arange(frames.shape[1])[None] < lengths[:, None]
        places = model.frames.places(lengths)
        return model(input_features=frames, attention_mask=mask.long()).logits.float(), places
    places = -(-lengths // model.subsampling)
    return model(frames, places), places


def trained(name: str, method: str, data: Data, options) -> dict[str, Any]:
    model, size = build(method, data, options), options.batch_size
    folder = options.runs / f"{name}_{method}".replace(" ", "_").replace(",", "")
    order = sorted(range(len(data.train)), key=lambda i: len(data.train[i].frames))
    batches = [order[i : i + size] for i in range(0, len(order), size)]  # of similar length

    def loss(model: nn.Module, step: int) -> Tensor:
        epoch, place = divmod(step, len(batches))
        rows = [data.train[i] for i in batches[np.random.default_rng(epoch).permutation(len(batches))[place]]]
        logits, places = logits_of(model, rows)
        labels = torch.from_numpy(np.concatenate([x.ids for x in rows]))
        counts = torch.tensor([len(x.ids) for x in rows])
        return ctc_loss(logits.log_softmax(-1).transpose(0, 1), labels, places, counts)

    done = train(
        folder, model, loss, options.epochs * len(batches), every=len(batches) * max(1, options.epochs // 6),
        learning_rate=options.learning_rate,
        measure=lambda model: {"error": errors(model, data.test, lambda x: best_path(x.numpy()), size)},
    )  # fmt: skip
    if isinstance(model, TarnnForCTC) and data.front is not None:
        save(model, data, folder / "model")
    return {
        "error": done.curve[-1]["error"],
        "beam": errors(model, data.test, lambda x: beam_search(x.double().log_softmax(-1).numpy(), options.beam), size),
        "seconds_an_epoch": done.seconds / done.step * len(batches),
        "parameters": sum(x.numel() for x in model.parameters()), "epochs": done.step // len(batches), "curve": done.curve,
    }  # fmt: skip


@torch.no_grad()
def errors(
    model: nn.Module, rows: list[Utterance], decode: Callable[[Tensor], list[int]], size: int
) -> float:
    """Edits per symbol, in per cent."""
    pairs = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        for x, logits, places in zip(some, *logits_of(model, some)):
            pairs.append((decode(logits[:places]), x.ids.tolist()))
    return error_rate(pairs)


def save(model: TarnnForCTC, data: Data, folder: Path) -> None:
    """A checkpoint for `tarnn transcribe`: the model, its front end, its tokenizer."""
    model.save_pretrained(folder)
    assert data.front is not None
    data.front.save_pretrained(folder)
    vocab = {name: i for i, name in enumerate((BLANK, *data.symbols.names, "<unk>"))}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    tokenizer = Wav2Vec2CTCTokenizer(
        folder / "vocab.json", bos_token=None, eos_token=None, pad_token=BLANK, word_delimiter_token=SPACE
    )
    tokenizer.save_pretrained(folder)


def report(options, facts, results: dict[str, Any]) -> str:
    rows = []
    for name, found in results.items():
        for method, one in found.items():
            paper = PAPER.get(method, (None, None)) if name == "an4 phones" else (None, None)
            rows.append([
                name, method, f"{one['error']:.1f}", f"{one['beam']:.1f}", f"{one['seconds_an_epoch']:.1f}",
                f"{one['parameters']:,}", *paper,
            ])  # fmt: skip
    return page(
        "Speech recognition with CTC, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, {options.subsampling} frames per place, "
        f"{options.epochs} epochs, batches of {options.batch_size}. Error: edits per letter or phone, in per cent, of test "
        f"utterances, by the most likely path and by a beam of {options.beam}; seconds per epoch in processor time of one "
        "thread. The paper's columns are of WSJ (80 hours, 9 layers, a GPU). One run each.",
        markdown(
            ["task", "method", "error", "beam", "s per epoch", "parameters", "paper: PER", "paper: s per epoch"], rows, left=2
        ),
    )  # fmt: skip


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(len(results))
    for axes, (name, found) in zip(every, results.items()):
        for method, one in found.items():
            line(axes, [(x["step"], x["error"]) for x in one["curve"]], METHODS[method], method)
        label(axes, "steps", "edits per symbol, %", scales="linear linear", title=name, legend="")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
