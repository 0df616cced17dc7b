"""Language models with softmax, elu + 1 and Performer attention, at equal parameters and steps: figure 5 in small.

    python experiments/long_softmax.py --books FOLDER       # under half an hour on two cores; killed, it goes on
    python experiments/long_softmax.py --books FOLDER --quick

Byte-level models of one size read novels; what they make of a novel that they have not read is plotted against
steps, in bits per byte. As in the paper (PG-19, figure 5, right): softmax; Performer with positive features, drawn
once and drawn anew; SMREG; Performer-ReLU; and the Linear Transformer's elu + 1. Positions are added to the
embedding and nothing decays, so that attention is all that differs. Each run is a folder that `tarnn train` would
have made, in --runs; one that is complete is not run again.

FOLDER holds books as .txt or .txt.gz; the one named by --unseen is kept for validation.
Choromanski et al. 2021 (arXiv 2009.14794), section 4.3.
"""

import argparse
import gzip
from pathlib import Path
from typing import Any

import torch
from output import RESULTS, markdown, write

from tarnn.errors import UserError
from tarnn.tasks import TextSettings
from tarnn.training.folder import LOG
from tarnn.training.log import read_log
from tarnn.training.run import train

FULL = {
    "steps": 600, "context": 512, "batch_size": 4, "hidden_size": 128, "layers": 4, "features": 128,
    "redraw_every": 50, "eval_every": 50, "validation_bytes": 65536, "training_bytes": None,
}  # fmt: skip
QUICK = {
    "steps": 8, "context": 64, "batch_size": 2, "hidden_size": 32, "layers": 1, "features": 16,
    "redraw_every": 4, "eval_every": 4, "validation_bytes": 2048, "training_bytes": 65536,
}  # fmt: skip
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {  # name → (settings of the run, how it is drawn)
    "softmax": ({"attention": "softmax"}, "#d55e00 -"),
    "elu + 1": ({"feature_map": "elu"}, "#e69f00 -"),
    "Performer-softmax, redrawn": ({"feature_map": "favor"}, "#0072b2 -"),
    "Performer-softmax, drawn once": ({"feature_map": "favor", "redraw_every": 0}, "#0072b2 --"),
    "SMREG, redrawn": ({"feature_map": "smreg"}, "#56b4e9 -"),
    "Performer-ReLU": ({"feature_map": "generalized"}, "#009e73 -"),
}


def main() -> int:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    training, validation = texts(options)
    results: dict[str, Any] = {}
    for name in options.only or VARIANTS:
        print(f"{name} …", flush=True)
        results[name] = run(name, training, validation, options)
        write(
            options.out,
            "long_softmax",
            {"settings": sizes(options), "results": results},
            report(results, options),
        )
        plot(results, options.out / "long_softmax.png")
    print(report(results, options))
    print(options.out / "long_softmax.png")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--books", type=Path, required=True, help="a folder of .txt or .txt.gz")
    parser.add_argument(
        "--unseen", default="pride_and_prejudice", help="the book that is kept for validation"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/long_softmax"), help="where the runs are kept"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    parser.add_argument(
        "--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT", help=f"of: {', '.join(VARIANTS)}"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="under a minute: a tiny model, a few steps")
    for name, value in FULL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{value} (--quick: {QUICK[name]})")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in (*FULL, "learning_rate")}


def texts(options: argparse.Namespace) -> tuple[Path, Path]:
    """The books unpacked beside the runs: a folder to train on, a file to validate on."""
    found = {x.name.split(".")[0]: x for x in sorted(options.books.glob("*.txt*"))}
    if options.unseen not in found or len(found) < 2:
        raise SystemExit(
            f"{options.books} should hold two books or more, {options.unseen} among them; it has {', '.join(found) or 'none'}."
        )
    training, validation = options.runs / "text", options.runs / "unseen.txt"
    training.mkdir(parents=True, exist_ok=True)
    for name, path in found.items():
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if name == options.unseen:
            validation.write_bytes(content[: options.validation_bytes])
        else:
            (training / f"{name}.txt").write_bytes(content[: options.training_bytes])
    return training, validation


def settings(name: str, training: Path, validation: Path, options: argparse.Namespace) -> TextSettings:
    """The run of a variant; the same name is the same run, so it goes on where it stopped."""
    given = {"redraw_every": options.redraw_every, **VARIANTS[name][0]}
    if given.get("feature_map") in ("favor", "smreg"):
        given["feature_map_options"] = {given["feature_map"]: {"num_features": options.features}}
    return TextSettings(
        sources=(str(training),), out=options.runs / name.replace(" ", "_").replace(",", ""), val=str(validation),
        context=options.context, hidden_size=options.hidden_size, layers=options.layers, heads=4, decay="none",
        position="sinusoidal", steps=options.steps, batch_size=options.batch_size,
        learning_rate=options.learning_rate, eval_every=options.eval_every, save_every=options.eval_every, keep=1,
        sample_tokens=0, resume=True, **given,
    )  # fmt: skip


def run(name: str, training: Path, validation: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train, unless that was done; the log's validations, and what became of the run."""
    wanted = settings(name, training, validation, options)
    stopped = ""
    if last_step(wanted.out) < options.steps:
        try:
            train(wanted)
        except UserError as error:
            if "training stopped after step" not in str(error):
                raise
            stopped = str(error)  # a loss that is no number is a result, too
    lines = [line for line in read_log(wanted.out / LOG) if "validation_bits_per_byte" in line]
    return {
        "steps": [line["step"] for line in lines],
        "bits_per_byte": [line["validation_bits_per_byte"] for line in lines],
        "stopped": stopped,
    }


def last_step(folder: Path) -> int:
    """Of the validations of a run."""
    return max(
        (line["step"] for line in read_log(folder / LOG) if "validation_bits_per_byte" in line), default=0
    )


def report(results: dict[str, Any], options: argparse.Namespace) -> str:
    rows = [
        [
            name,
            f"{found['bits_per_byte'][-1]:.3f}" if found["bits_per_byte"] else "–",
            f"{min(found['bits_per_byte']):.3f}" if found["bits_per_byte"] else "–",
            "stopped: not a number" if found["stopped"] else str(found["steps"][-1]),
        ]
        for name, found in results.items()
    ]
    return "\n\n".join([
        "# Byte-level language models of novels, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, 4 heads, {options.batch_size} × {options.context} bytes "
        f"a step; random features: {options.features} a head, redrawn every {options.redraw_every} steps where so named. "
        f"Bits per byte of the first {options.validation_bytes:,} bytes of {options.unseen}, which is not trained on. One "
        "run each: differences of a few hundredths may be chance.",
        markdown(["attention", "bits per byte at the end", "lowest", "steps"], rows),
    ]) + "\n"  # fmt: skip


def plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    for name, found in results.items():
        color, line = VARIANTS[name][1].split()
        axes.plot(found["steps"], found["bits_per_byte"], color=color, linestyle=line, marker=".", label=name)
    axes.set(xlabel="steps", ylabel="bits per byte of an unseen novel")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
