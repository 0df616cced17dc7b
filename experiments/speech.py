"""Speech recognition with CTC: table 3 of "Transformers are RNNs" in small, on AN4 and on spoken digits.

    python experiments/speech.py --data FOLDER          # killed, it goes on
    python experiments/speech.py --data FOLDER --quick

Linear attention that decays in both directions, softmax, LSH attention, no attention at all and a bidirectional LSTM read
frames of sound and write letters or phones; a causal linear model, which can transcribe a stream, stands beside them. All
have the same convolutional front, augmentation (tempo, SpecAugment), epochs and search for a learning rate; all but the LSTM
have the same depthwise convolution in each block. So "convolution alone" says what attention adds.

Rates are chosen by the errors on held-out training speakers of AN4. Each error is a mean over seeds, with an interval over
utterances and seeds. `--parts stream` measures how long the causal model takes to transcribe a stream.

FOLDER holds an4 (cepstra, 13 per frame, of 948 utterances; the phones are those of its dictionary) and fsdd (wav files of
spoken digits, read as log-mel frames and written as letters: "SEVEN"). Each task's test data are its own.
Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.3.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.error_tables import differences_table, errors_table, rates_table
from measures.recognizers import build
from measures.utterances import Data, read, sound_of_tests, without_speakers

from scripts.common.loop import Progress, train
from scripts.common.options import as_facts, parse
from scripts.common.plots import BLUE, GREEN, GREY, ORANGE, RED, SKY, label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import page
from tarnn.cli.transcribe import heard, open_speech
from tarnn.models import TarnnForCTC
from tarnn.tasks.speech.augmentation import AugmentedRows, SimilarLengths
from tarnn.tasks.speech.ctc import best_path, edits
from tarnn.tasks.speech.task import FILL, padded, symbols_tokenizer

METHODS = {
    "linear": BLUE,
    "convolution alone": GREY,
    "bi-LSTM": GREEN,
    "bi-LSTM, stacked frames": f"{GREEN} --",
    "softmax": RED,
    "linear, causal": SKY,
    "LSH": ORANGE,
}
LIKE = {  # whose learning rate they take
    "linear, causal": "linear",
    "softmax": "linear",
    "LSH": "linear",
    "bi-LSTM, stacked frames": "bi-LSTM",
}


class Task(NamedTuple):
    subsampling: int  # frames of 10 ms per place


TASKS = {"an4 phones": Task(4), "an4 letters": Task(4), "fsdd letters": Task(2)}
FULL = {
    "epochs": 30,
    "batch_size": 8,
    "hidden_size": 96,
    "layers": 3,
    "heads": 4,
    "seeds": [0, 1, 2],
    "rates": [2e-3, 4e-3],
    "rate_epochs": 6,
    "utterances": int,
    "data": Path,
    "runs": Path("runs/speech"),
}
QUICK = {
    "epochs": 2,
    "batch_size": 4,
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "utterances": 12,
    "seeds": [0],
    "rates": [4e-3],
}
PARTS = ["errors", "epoch", "stream"]
PAPER = {
    "bi-LSTM": (10.94, 1047),
    "softmax": (5.12, 2711),
    "LSH": (9.33, 2250),
    "linear": (8.08, 824),
}  # PER, s per epoch
COMPARED = [
    ("linear", "bi-LSTM"),
    ("linear", "bi-LSTM, stacked frames"),
    ("linear", "convolution alone"),
    ("linear", "softmax"),
    ("linear", "LSH"),
]
RATES = (
    "Errors on held-out training speakers of AN4 (phones, one seed), by learning rate; the best is taken in all tasks."
)
CHUNK = 0.2  # seconds of a stream that are read at a time


def main() -> int:
    lists = {"tasks": list(TASKS), "methods": list(METHODS), "parts": PARTS}
    about = {
        "data": "the folder with an4 and fsdd",
        "rates": "learning rates to choose from, on held-out speakers; one: no choice",
    }
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, results=earlier(options), report=report, figure=figure)


def earlier(options) -> dict[str, Any]:
    """What runs with the same settings left of other tasks and methods."""
    path, other = options.out / "speech.json", ("tasks", "methods", "parts", "seeds")
    if path.exists():
        data, settings = json.loads(path.read_text()), as_facts(options)
        if all(data["settings"].get(name) == value for name, value in settings.items() if name not in other):
            return data["results"]
    return {"rates": {}, "errors": {}, "epoch": {}, "stream": {}}


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the recordings are.")
    for name in options.tasks:
        data = read(name, options.data, TASKS[name].subsampling, options.utterances)
        if "errors" in options.parts:
            found = results["errors"].setdefault(name, {"symbols": [len(x.ids) for x in data.test], "methods": {}})
            for seed in options.seeds:
                for method in options.methods:
                    rate = chosen_rate(method, results["rates"], options)
                    found["methods"].setdefault(method, {})[str(seed)] = errors(name, method, data, rate, seed, options)
                    keep()
        if "epoch" in options.parts:
            results["epoch"].setdefault(name, {}).update(epochs_in_turns(data, options))
    if "stream" in options.parts and "fsdd letters" in options.tasks and "linear, causal" in options.methods:
        results["stream"] = streamed(options)


def chosen_rate(method: str, found: dict[str, dict[str, float]], options) -> float:
    """The learning rate with the fewest errors on held-out speakers, after a few epochs."""
    method = LIKE.get(method, method)
    if len(options.rates) == 1:
        return options.rates[0]
    name = "an4 phones"
    data = without_speakers(read(name, options.data, TASKS[name].subsampling, options.utterances))
    for rate in options.rates:
        if str(rate) not in found.setdefault(method, {}):
            model, folder = build(method, data, 0, options), options.runs / folder_name("rate", str(rate), method)
            found[method][str(rate)] = trained(folder, model, data, options.rate_epochs, rate, 0, options).curve[-1][
                "error"
            ]
    return min(options.rates, key=lambda rate: found[method][str(rate)])


def folder_name(*words: str) -> str:
    return "_".join(words).replace(" ", "_").replace(",", "")


def trained(folder: Path, model: nn.Module, data: Data, epochs: int, rate: float, seed: int, options) -> Progress:
    """One run, from where it was stopped."""
    rows = AugmentedRows([x.row for x in data.train], FILL, data.subsampling, seed)
    steps = epochs * len(data.train) // options.batch_size
    order = list(in_batches(data, steps, seed, options))

    def loss(model: nn.Module, step: int) -> Tensor:
        torch.manual_seed(1_000_003 * (seed + 1) + step)  # for dropout: as in a run that was never stopped
        return model(**rows.__getitems__(order[step])).loss

    def measured(model: nn.Module) -> dict[str, float]:
        wrong = edits_of(model, data, options)
        return {"error": 100 * sum(wrong) / sum(len(x.ids) for x in data.test)}

    return train(folder, model, loss, steps, every=max(1, steps // 10), learning_rate=rate, measure=measured)


def in_batches(data: Data, steps: int, seed: int, options) -> list[list[int]]:
    """The rows of each step."""
    size = options.batch_size
    order = list(SimilarLengths([len(x.frames) for x in data.train], steps * size, seed, size))
    return [order[i : i + size] for i in range(0, len(order), size)]


def errors(name: str, method: str, data: Data, rate: float, seed: int, options) -> dict[str, Any]:
    """A run of one method with one seed, and the edits of each test utterance."""
    folder, model = options.runs / folder_name(name, method, str(seed)), build(method, data, seed, options)
    done = trained(folder, model, data, options.epochs, rate, seed, options)
    if isinstance(model, TarnnForCTC) and data.front is not None:
        save(model, data, folder / "model")
    return {
        "edits": edits_of(model, data, options),
        "rate": rate,
        "minutes": done.seconds / 60,
        "parameters": sum(x.numel() for x in model.parameters()),
        "curve": done.curve,
    }


@torch.no_grad()
def edits_of(model: nn.Module, data: Data, options) -> list[int]:
    """Edits of the most likely path of each test utterance."""
    rows, size, counts = padded([x.row for x in data.test]), options.batch_size, []
    for start in range(0, len(data.test), size):
        some = data.test[start : start + size]
        logits = model(**rows.__getitems__(range(start, start + len(some)))).logits
        for x, row in zip(some, logits):
            path = best_path(row[: -(-len(x.frames) // data.subsampling)].numpy())
            counts.append(edits(path, x.ids.tolist()))
    return counts


def epochs_in_turns(data: Data, options) -> dict[str, float]:
    """Seconds of one epoch (forward, backward), by method; they take turns, batch by batch."""
    models = {method: build(method, data, 0, options).train() for method in options.methods}
    rows, seconds = padded([x.row for x in data.train]), dict.fromkeys(models, 0.0)
    for batch in in_batches(data, len(data.train) // options.batch_size, 0, options):
        given = rows.__getitems__([i % len(data.train) for i in batch])
        for method, model in models.items():
            begun = time.process_time()
            model(**given).loss.backward()
            model.zero_grad()
            seconds[method] += (time.process_time() - begun) / torch.get_num_threads()
    return seconds


def save(model: TarnnForCTC, data: Data, folder: Path) -> None:
    """A checkpoint for `tarnn transcribe`: the model, its front end, its tokenizer."""
    model.save_pretrained(folder)
    assert data.front is not None
    data.front.save_pretrained(folder)
    symbols_tokenizer(folder, data.symbols.names).save_pretrained(folder)


def streamed(options) -> dict[str, float]:
    """How long `tarnn transcribe --stream` takes for all test recordings of digits, one after another."""
    model, front, _ = open_speech(options.runs / folder_name("fsdd letters", "linear, causal", "0") / "model")
    samples = sound_of_tests(options.data / "fsdd" / "recordings.zip", options.utterances)
    sound, seconds = len(samples) / front.sampling_rate, []
    for _ in range(5):
        begun = time.process_time()
        for _ in heard(model, front, samples, round(CHUNK * front.sampling_rate)):
            pass
        seconds.append((time.process_time() - begun) / torch.get_num_threads())
    return {"sound": sound, "seconds": statistics.median(seconds), "state": model.new_state(1).nbytes}


def report(options, facts, results: dict[str, Any]) -> str:
    return page(
        "Speech recognition with CTC, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, batches of {options.batch_size}, "
        f"{options.epochs} epochs. Error: edits per letter or phone, in per cent, of test utterances, by the most likely path: "
        "the mean over seeds, with a 95 % interval by a bootstrap over utterances and seeds. Seconds of one epoch's forward and "
        "backward passes: processor time, the methods in turns. The paper's columns are of WSJ (80 hours, 9 layers, a GPU).",
        errors_table(results["errors"], results["epoch"], {"an4 phones": PAPER}),
        "Differences, in points, paired by utterance. Decided: the interval leaves zero out.",
        differences_table(results["errors"], COMPARED),
        results["rates"] and f"{RATES}\n\n{rates_table(results['rates'])}",
        stream_sentence(results["stream"]),
    )


def stream_sentence(found: dict[str, float]) -> str:
    if not found:
        return ""
    return (
        f"A stream of {found['sound']:.0f} s of digits, {CHUNK:g} s at a time, takes the causal model and its front end "
        f"{found['seconds']:.2f} s: real-time factor "
        f"{found['seconds'] / found['sound']:.3f}, with a state of {found['state']:,} bytes."
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(max(1, len(results["errors"])))
    for axes, (name, found) in zip(every, results["errors"].items()):
        for method, runs in found["methods"].items():
            curves = [one["curve"] for one in runs.values()]
            points = [(at[0]["step"], statistics.mean(x["error"] for x in at)) for at in zip(*curves)]
            line(axes, points, METHODS[method], method)
        label(axes, "steps", "edits per symbol, %", scales="linear log", title=name)
    return made


if __name__ == "__main__":
    raise SystemExit(main())
