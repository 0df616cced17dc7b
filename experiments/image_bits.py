"""Bits per dimension of images, linear and softmax attention: tables 1 and 2 of "Transformers are RNNs".

    python experiments/image_bits.py        # MNIST and CIFAR-10, by default from ../shared/data; killed, it goes on
    python experiments/image_bits.py --mnist FOLDER --datasets mnist --updates 5000
    python experiments/image_bits.py --layers 8 --hidden 256 --batch-size 16 --learning-rate 1e-4 --updates 937500
                                            # the paper's MNIST model and settings (on a GPU, for days)
    python experiments/image_bits.py --quick

Every method trains for as many updates, from the same seed on the same batches, at a constant learning rate, with
RAdam and weight decay 0.01, as the paper's scripts do; held-out images are looked at on the way. From one run each,
two comparisons follow: at equal settings, and at equal time, where an update's time is measured by itself. The models
kept are judged on test images. The paper compares MNIST at equal epochs and CIFAR-10 at equal time, so its CIFAR-10
column says nothing about the attention function alone. Batches of 4 and a learning rate of 2e-3, where the scripts
have 16 and 10, 1e-4 and 2e-4: a run of minutes must learn from few images, and RAdam warms up for a thousand updates.

Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.2.
"""

import math
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.image_bits import bits_per_dim
from scripts.common.options import parse
from scripts.common.plots import ATTENTION, label, line, panels
from scripts.common.results import run
from scripts.common.tables import markdown, page
from scripts.common.training import trained
from tarnn.models import TarnnForImageGeneration
from tarnn.tasks import ImageSettings
from tarnn.tasks.checkpoint import open_model
from tarnn.tasks.images import Images, read_images

SHARED = Path(__file__).parents[2] / "shared" / "data"
METHODS = ["linear", "softmax"]
FULL = {
    "updates": 1500,
    "layers": 4,
    "hidden": 128,
    "batch_size": 4,
    "learning_rate": 2e-3,
    "eval_every": 100,
    "test_images": 300,
    "val_images": 64,
    "train_images": int,
    "pool": 1,
    "datasets": ["mnist", "cifar10"],
    "heads": 8,
    "seed": 0,
    "methods": METHODS,
    "mnist": SHARED / "mnist",
    "cifar10": SHARED / "cifar10",
    "runs": Path("runs/image_bits"),
}
QUICK = {
    "updates": 10,
    "layers": 2,
    "hidden": 32,
    "eval_every": 5,
    "test_images": 8,
    "val_images": 4,
    "train_images": 64,
    "datasets": ["mnist"],
}
CHOICES = {"methods": METHODS, "datasets": ["mnist", "cifar10"]}
# of the paper: images of its runs, what it reports, and how deep its models are
PAPER_IMAGES = {"mnist": 15_000_000, "cifar10": 5_000_000}  # 937,500 updates of 16; 500,000 of 10
PAPER = {"mnist": {"softmax": 0.621, "linear": 0.644}, "cifar10": {"softmax": 3.47, "linear": 3.40}}
PAPER_LAYERS = {"mnist": 8, "cifar10": 16}


def main() -> int:
    options = parse(__file__, __doc__, FULL, QUICK, choices=CHOICES, about={"pool": "so many pixels a side become one"})
    return run(options, measure, facts=facts, report=report, figure=figure)


def measure(options, found: dict[str, dict[str, Any]], keep) -> None:
    for name in options.datasets:
        found[name] = {method: one_run(name, method, options) for method in options.methods}
        keep()


def facts(options, found) -> dict[str, Any]:
    return {"compared": {name: compare(runs) for name, runs in found.items()}}


def one_run(name: str, method: str, options) -> dict[str, Any]:
    """Train a method on a set, or go on with a run that was stopped; its curve, cost and bits on test images."""
    folder = options.runs / f"{name}-{method}"
    source = prepared(name, options)
    settings = ImageSettings(
        (str(source),),
        folder,
        preset="paper",
        attention=method,
        layers=options.layers,
        hidden_size=options.hidden,
        heads=options.heads,
        steps=options.updates,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        eval_every=options.eval_every,
        save_every=options.eval_every,
        keep=1,
        val=f"{source}:valid",
        seed=options.seed,
        resume=True,
    )
    looks = trained(settings, "validation_bits_per_dim")
    curve = [{"update": line["step"], "bits": line["validation_bits_per_dim"]} for line in looks]
    model = open_model(folder, tasks=("image",), whole=True)
    test = read_images(f"{source}:test")
    bits = torch.cat(list(bits_per_dim(model, test)))
    return {
        "curve": curve,
        "updates": curve[-1]["update"],
        "images": curve[-1]["update"] * settings.batch_size,
        "seconds_an_update": seconds_an_update(model, read_images(f"{source}:train"), settings.batch_size),
        "parameters": model.num_parameters(),
        "test_bits": bits.mean().item(),
        "test_error": bits.std().item() / math.sqrt(len(bits)),
        "test_images": len(bits),
    }


def seconds_an_update(model: TarnnForImageGeneration, images: Images, batch_size: int, rounds: int = 3) -> float:
    """Forward, backward and optimizer: the median, in processor time a thread, which other work changes little."""
    pixels, times = torch.from_numpy(images.pixels[:batch_size].copy()), []
    optimizer = torch.optim.RAdam(model.train().parameters(), lr=0.0)
    for _ in range(rounds + 1):
        start = time.process_time()
        model(pixels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.process_time() - start) / torch.get_num_threads())
    return statistics.median(times[1:])


def prepared(name: str, options) -> Path:
    """The set as npz files of the size wished for: training images, and a few that are held out."""
    import numpy as np

    folder = options.runs / f"{name}-data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    images, held_out = read_images(f"{getattr(options, name)}:train").split(options.val_images)
    test, n = read_images(f"{getattr(options, name)}:test").take(slice(options.test_images)), options.pool
    for part, some in (("train", cut(images, options.train_images)), ("valid", held_out), ("test", test)):
        b, h, w, c = some.pixels.shape
        pooled = some.pixels.reshape(b, h // n, n, w // n, n, c).mean((2, 4)).round().astype(np.uint8)
        np.savez(folder / f"{part}.npz", images=pooled)
    return folder


def cut(images: Images, most: int | None) -> Images:
    return images if most is None else images.take(slice(most))


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each method at equal settings and at equal time, beside its facts."""
    updates = min(run["updates"] for run in runs.values())
    seconds = min(run["updates"] * run["seconds_an_update"] for run in runs.values())
    return {
        method: {
            "at_updates": updates,
            "bits_at_updates": last(run["curve"], updates),
            "at_seconds": seconds,
            "bits_at_seconds": last(run["curve"], seconds / run["seconds_an_update"]),
            **{k: v for k, v in run.items() if k != "curve"},
        }
        for method, run in runs.items()
    }


def last(curve: list[dict[str, float]], updates: float) -> float | None:
    """Bits at the last look that was not beyond so many updates."""
    seen = [point["bits"] for point in curve if point["update"] <= updates * (1 + 1e-9)]
    return seen[-1] if seen else None


def report(options, facts, found) -> str:
    parts = []
    for name, methods in facts["compared"].items():
        one = next(iter(methods.values()))
        share = max(run["images"] for run in methods.values()) / PAPER_IMAGES[name]
        rows = [
            [
                method,
                bits(run["bits_at_updates"]),
                bits(run["bits_at_seconds"]),
                f"{run['test_bits']:.3f} ± {run['test_error']:.3f}",
                f"{run['updates']:,}",
                f"{run['seconds_an_update']:.2f}",
                f"{PAPER[name][method]:.3f}",
            ]
            for method, run in methods.items()
        ]
        header = [
            "attention",
            f"valid., {one['at_updates']:,} updates each",
            f"valid., {one['at_seconds']:,.0f} s each",
            f"test, {one['test_images']:,} images",
            "updates",
            "seconds an update",
            "paper (test)",
        ]
        parts += [
            f"## {name}",
            f"{options.layers} layers (paper: {PAPER_LAYERS[name]}), {options.hidden} wide (256), {one['parameters']:,} "
            f"parameters; batches of {options.batch_size}, learning rate {options.learning_rate:g}: at most {share:.3%} of the "
            f"images that the paper's run saw. {options.threads} threads. All values of an image are predicted, the first too.",
            markdown(header, rows),
        ]
    return page(
        "Bits per dimension of images", *parts, "![bits per dimension against seconds of training](image_bits.png)"
    )


def bits(number: float | None) -> str | None:
    return None if number is None else f"{number:.3f}"


def loaded(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the runs of a results file; older ones keep their curves apart."""
    return facts.get("curves", facts["results"])


def figure(options, facts, found):
    """Draw bits against time: methods have the same number of updates, and the slower one ends later. One seed each."""
    made, every = panels(len(found))
    for axes, (name, runs) in zip(every, found.items(), strict=True):
        for method, one in runs.items():
            points = ((p["update"] * one["seconds_an_update"], p["bits"]) for p in one["curve"])
            line(axes, points, ATTENTION[method], method, marker="")
        label(
            axes,
            "seconds of training",
            "bits per dimension, held out",
            title=f"{name}, one seed",
            scales="linear linear",
        )
    return made


if __name__ == "__main__":
    sys.exit(main())
