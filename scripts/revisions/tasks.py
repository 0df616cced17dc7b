"""A run of each task that the old revision began: cut short, resumed, measured and asked, in either revision.

`write` runs the old revision's command line; `compute` then goes on with copies of its folders.
"""

import json
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

from scripts.revisions.files import command, cut_back, said, weights

A_RUN = "--steps 40 --hidden-size 16 --layers 1 --heads 2 --batch-size 8 --seed 1 --save-every 20 --eval-every 20"
# what a run of the task takes besides, and one input of `tarnn predict`
TASKS = {
    "masked-lm": (["--context", "24"], "one <|mask|> three"),
    "classification": (["--max-length", "9"], "two two"),
    "ctc": ([], "1.wav"),
    "image": (["--class-conditional", "--sample-images", "2"], None),
}


def write(folder: Path) -> None:
    for task, source in sources(folder.parent).items():
        command("train", source, "--task", task, "--out", folder / task, *A_RUN.split(), *TASKS[task][0])


def compute(number: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for task, source in sources(folder.parent).items():
        run, (options, example) = folder / task, TASKS[task]
        found |= weights(f"{task} as saved", run)
        found[f"{task}: eval"] = said("eval", run, "--json", "--quiet").replace(str(run), "RUN")
        found[f"{task}: eval of data"] = said("eval", run, source, "--json", "--quiet").replace(str(run), "RUN")
        if example is not None:
            example = str(folder.parent / example) if task == "ctc" else example
            found[f"{task}: predict"] = said("predict", run, example, "--json")
        cut_back(run)
        command("train", source, "--task", task, "--out", run, *A_RUN.split(), *options, "--resume")
        found |= weights(f"{task} resumed", run)
        lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        found[f"{task}: log"] = [line | {"seconds": 0} for line in lines]
    found["image: drawn"] = (folder / "image" / "sample.png").read_bytes().hex()
    return found


def sources(folder: Path) -> dict[str, Path]:
    """By task: a file that both revisions find at one place, since a run is resumed with the words that it began with."""
    names = {"masked-lm": "words.txt", "classification": "labelled.tsv"}
    names |= {"ctc": "sounds.tsv", "image": "images.npz"}
    if not (folder / "images.npz").exists():
        draw = random.Random(0)
        texts = [" ".join(draw.choice(["one", "two", "three"]) for _ in range(4)) for _ in range(60)]
        (folder / "words.txt").write_text(" ".join(texts))
        (folder / "labelled.tsv").write_text("".join(f"{x.split()[0]}\t{x}\n" for x in texts))
        (folder / "sounds.tsv").write_text("".join(f"{i}.wav\t{'A' if i % 2 else 'b'}\n" for i in range(24)))
        for i in range(24):
            sound(folder / f"{i}.wav", 1500 if i % 2 else 300, 1600 + 200 * (i % 3))
        pixels = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8)
        np.savez(folder / "images.npz", images=pixels, labels=np.arange(40) % 3)
    return {task: folder / name for task, name in names.items()}


def sound(path: Path, hertz: int, samples: int) -> None:
    values = (20000 * np.sin(2 * np.pi * hertz * np.arange(samples) / 8000)).astype(np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(values.tobytes())
