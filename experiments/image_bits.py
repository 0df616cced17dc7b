"""Bits per dimension of images, linear and softmax attention: tables 1 and 2 of "Transformers are RNNs".

    python experiments/image_bits.py                                   # MNIST and CIFAR-10, by default from ../shared/data
    python experiments/image_bits.py --mnist FOLDER --datasets mnist --minutes 60
    python experiments/image_bits.py --layers 8 --hidden 256           # the paper's MNIST model (on a GPU, for days)
    python experiments/image_bits.py --quick

Every method trains for the same time, from the same seed on the same batches, at a constant learning rate, as the
paper's scripts do (RAdam, weight decay 0.01); held-out images are looked at on the way. From one run each, two
comparisons follow: at equal settings (after as many updates as the slowest had) and at equal time. The models kept
are judged on test images. The paper compares MNIST at equal epochs and CIFAR-10 at equal time, so its CIFAR-10
column says nothing about the attention function alone.

Katharopoulos et al. 2020 (arXiv 2006.16236), section 4.2.
"""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from output import markdown, write
from settings import as_facts, parser, resolve

from tarnn.analysis.image_likelihood import bits_per_dim
from tarnn.data import Images, read_images
from tarnn.generation.checkpoint import open_model
from tarnn.training.run import train
from tarnn.training.settings import ImageSettings

SHARED = Path(__file__).parents[2] / "shared" / "data"
COLORS = {"softmax": "#d55e00", "linear": "#0072b2"}
FULL = {
    "minutes": 30.0, "layers": 4, "hidden": 128, "eval_every": 100, "test_images": 300, "val_images": 64,
    "train_images": None, "datasets": ["mnist", "cifar10"],
}  # fmt: skip
QUICK = {
    "minutes": 0.05, "layers": 2, "hidden": 32, "eval_every": 5, "test_images": 8, "val_images": 4,
    "train_images": 64, "datasets": ["mnist"],
}  # fmt: skip
# of the paper: batch and learning rate of its scripts, updates and images of its MNIST run, and what it reports
BATCH = {"mnist": 16, "cifar10": 10}
LEARNING_RATE = {"mnist": 1e-4, "cifar10": 2e-4}
PAPER_IMAGES = {"mnist": 15_000_000, "cifar10": 5_000_000}  # 937,500 updates of 16; 500,000 of 10
PAPER = {"mnist": {"softmax": 0.621, "linear": 0.644}, "cifar10": {"softmax": 3.47, "linear": 3.40}}
PAPER_LAYERS = {"mnist": 8, "cifar10": 16}


def main() -> int:
    made = parser(__doc__)
    for name in ("layers", "hidden", "eval_every", "test_images", "val_images", "train_images"):
        made.add_argument(f"--{name.replace('_', '-')}", type=int)
    made.add_argument("--minutes", type=float, help="of each method on each set")
    made.add_argument("--datasets", nargs="+", choices=list(BATCH))
    made.add_argument("--mnist", type=Path, default=SHARED / "mnist")
    made.add_argument("--cifar10", type=Path, default=SHARED / "cifar10")
    made.add_argument("--batch-size", type=int, help="default: that of the paper's scripts, 16 and 10")
    made.add_argument(
        "--learning-rate", type=float, help="default: that of the paper's scripts, 1e-4 and 2e-4"
    )
    made.add_argument("--heads", type=int, default=8)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--methods", nargs="+", choices=list(COLORS), default=["linear", "softmax"])
    made.add_argument("--runs", type=Path, default=Path("runs/image_bits"), help="where the runs' folders go")
    options = resolve(made, FULL, QUICK)
    found = {name: {m: one_run(name, m, options) for m in options.methods} for name in options.datasets}
    results = {name: compare(runs) for name, runs in found.items()}
    facts = {"settings": as_facts(options), "results": results, "curves": found}
    files = write(options.out, "image_bits", facts, report(results, options))
    plot(found, options.out / "image_bits.png")
    print(*files, options.out / "image_bits.png", sep="\n")
    return 0


def one_run(name: str, method: str, options) -> dict[str, Any]:
    """Train a method on a set; its curve and its bits on test images."""
    folder = options.runs / f"{name}-{method}"
    source = prepared(name, options)
    settings = ImageSettings(
        (str(source),), folder, preset="paper", attention=method, layers=options.layers, hidden_size=options.hidden,
        heads=options.heads, max_minutes=options.minutes,
        batch_size=options.batch_size or BATCH[name], learning_rate=options.learning_rate or LEARNING_RATE[name],
        eval_every=options.eval_every, save_every=10 * options.eval_every, val=f"{source}:valid", seed=options.seed,
        overwrite=True,
    )  # fmt: skip
    train(settings)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    curve = [
        {"update": x["step"], "seconds": x["seconds"], "bits": x["validation_bits_per_dim"]}
        for x in lines if "validation_bits_per_dim" in x
    ]  # fmt: skip
    test = read_images(str(options_path(name, options)) + ":test").take(slice(options.test_images))
    bits = torch.cat(list(bits_per_dim(open_model(folder, kinds=("tarnn_image",)), test)))
    return {
        "curve": curve, "updates": lines[-1]["step"], "seconds": lines[-1]["seconds"],
        "images": lines[-1]["step"] * settings.batch_size, "parameters": parameters(folder),
        "test_bits": bits.mean().item(), "test_error": bits.std().item() / math.sqrt(len(bits)),
        "test_images": len(bits),
    }  # fmt: skip


def options_path(name: str, options) -> Path:
    return getattr(options, name)


def prepared(name: str, options) -> Path:
    """The set as npz files of the size wished for: training images, and a few that are held out."""
    import numpy as np

    folder = options.runs / f"{name}-data"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    images, held_out = read_images(f"{options_path(name, options)}:train").split(options.val_images)
    for part, some in (("train", cut(images, options.train_images)), ("valid", held_out)):
        np.savez(folder / f"{part}.npz", images=some.pixels)
    return folder


def cut(images: Images, most: int | None) -> Images:
    return images if most is None else images.take(slice(most))


def parameters(folder: Path) -> int:
    return json.loads((folder / "settings.json").read_text())["run"]["parameters"]


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each method at equal settings and at equal time, beside its facts."""
    updates = min(run["curve"][-1]["update"] for run in runs.values())
    seconds = min(run["curve"][-1]["seconds"] for run in runs.values())
    return {
        method: {
            "at_updates": updates, "bits_at_updates": last(run["curve"], "update", updates),
            "at_seconds": seconds, "bits_at_seconds": last(run["curve"], "seconds", seconds),
            **{k: v for k, v in run.items() if k != "curve"},
        }
        for method, run in runs.items()
    }  # fmt: skip


def last(curve: list[dict[str, float]], what: str, limit: float) -> float | None:
    """Bits at the last look that was not beyond a limit."""
    seen = [point["bits"] for point in curve if point[what] <= limit]
    return seen[-1] if seen else None


def report(results, options) -> str:
    parts = ["# Bits per dimension of images"]
    for name, methods in results.items():
        one = next(iter(methods.values()))
        share = max(run["images"] for run in methods.values()) / PAPER_IMAGES[name]
        rows = [
            [
                method, show(run["bits_at_updates"]), show(run["bits_at_seconds"]),
                f"{run['test_bits']:.3f} ± {run['test_error']:.3f}", f"{run['updates']:,}", f"{run['images']:,}",
                f"{PAPER[name][method]:.3f}",
            ]
            for method, run in methods.items()
        ]  # fmt: skip
        header = [
            "attention", f"valid., {one['at_updates']:,} updates each", f"valid., {one['at_seconds']:,.0f} s each",
            f"test, {one['test_images']:,} images", "updates", "images seen", "paper (test)",
        ]  # fmt: skip
        parts += [
            f"## {name}",
            f"{options.layers} layers (paper: {PAPER_LAYERS[name]}), {options.hidden} wide (256), {one['parameters']:,} "
            f"parameters; {options.minutes:g} minutes each on {options.threads} threads: at most {share:.2%} of the images "
            "that the paper's run saw. All values of an image are predicted, the first too.",
            markdown(header, rows),
        ]
    return "\n\n".join([*parts, "![bits per dimension against time](image_bits.png)"]) + "\n"


def show(bits: float | None) -> str:
    return "–" if bits is None else f"{bits:.3f}"


def plot(found: dict[str, dict[str, dict[str, Any]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(found), 3.8), layout="constrained", dpi=150)
    for axes, (name, runs) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        for method, run in runs.items():
            points = run["curve"]
            axes.plot(
                [p["seconds"] for p in points],
                [p["bits"] for p in points],
                color=COLORS[method],
                label=method,
            )
        axes.set(title=name, xlabel="seconds of training", ylabel="bits per dimension, held out")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
