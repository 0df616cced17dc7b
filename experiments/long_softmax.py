"""Language models with softmax, elu + 1 and Performer attention, at equal parameters and steps: figure 5 in small.

    python experiments/long_softmax.py --books FOLDER       # under half an hour on two cores; killed, it goes on
    python experiments/long_softmax.py --books FOLDER --steps 5000 --seeds 0 1 2 --threads 1     # 20 minutes a run
    python experiments/long_softmax.py --books FOLDER --quick

Byte-level models of one size read novels; what they make of a novel that they have not read is plotted against
steps, in bits per byte. As in the paper (PG-19, figure 5, right): softmax; Performer with positive features, drawn
once and drawn anew; SMREG; Performer-ReLU; and the Linear Transformer's elu + 1. Positions are added to the
embedding and nothing decays, so that attention is all that differs. A seed sets the weights at the start, the order of
the text and the draws; runs of one seed read the same, so they are compared with each other. Each run is a folder that
`tarnn train` would have made, in --runs; one that is complete is not run again.

FOLDER holds books as .txt or .txt.gz; the one named by --unseen is kept for validation.
Choromanski et al. 2021 (arXiv 2009.14794), section 4.3.
"""

import argparse
import gzip
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.options import parse
from scripts.common.plots import label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mean_and_error, page
from scripts.common.training import trained, validations
from tarnn.errors import UserError
from tarnn.tasks import TextSettings

FULL = {
    "steps": 600,
    "context": 512,
    "batch_size": 4,
    "hidden_size": 128,
    "layers": 4,
    "features": 128,
    "redraw_every": 50,
    "eval_every": 50,
    "validation_bytes": 65536,
    "training_bytes": int,
    "learning_rate": 2e-3,
    "seeds": [0],
    "books": Path,
    "unseen": "pride_and_prejudice",
    "runs": Path("runs/long_softmax"),
}
QUICK = {
    "steps": 8,
    "context": 64,
    "batch_size": 2,
    "hidden_size": 32,
    "layers": 1,
    "features": 16,
    "redraw_every": 4,
    "eval_every": 4,
    "validation_bytes": 2048,
    "training_bytes": 65536,
}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {  # name → (settings of the run, how it is drawn)
    "softmax": ({"attention": "softmax"}, "#d55e00 -"),
    "elu + 1": ({"feature_map": "elu"}, "#e69f00 -"),
    "Performer-softmax, redrawn": ({"feature_map": "favor"}, "#0072b2 -"),
    "Performer-softmax, redrawn every 500": ({"feature_map": "favor", "redraw_every": 500}, "#0072b2 :"),
    "Performer-softmax, drawn once": ({"feature_map": "favor", "redraw_every": 0}, "#0072b2 --"),
    "SMREG, redrawn": ({"feature_map": "smreg"}, "#56b4e9 -"),
    "Performer-ReLU": ({"feature_map": "generalized"}, "#009e73 -"),
}
REFERENCE = "Performer-softmax, redrawn"  # what the others are compared with


def main() -> int:
    return run(settings(), measure, report=report, figure=figure)


def settings() -> argparse.Namespace:
    only = {"only": list(VARIANTS)}
    return parse(__file__, __doc__, FULL | only, QUICK, choices=only)


def measure(options, results: dict[str, Any], keep) -> None:
    training, validation = texts(options)
    for seed in options.seeds:
        for name in options.only:
            print(f"{name}, seed {seed} …", flush=True)
            results.setdefault(name, []).append(one_run(name, seed, training, validation, options))
            keep()


def texts(options: argparse.Namespace) -> tuple[Path, Path]:
    """The books unpacked beside the runs: a folder to train on, a file to validate on."""
    if options.books is None:
        raise Unmeasured("--books FOLDER says where the books are.")
    found = {x.name.split(".")[0]: x for x in sorted(options.books.glob("*.txt*"))}
    if options.unseen not in found or len(found) < 2:
        raise Unmeasured(
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


def variant(name: str, seed: int, training: Path, validation: Path, options: argparse.Namespace) -> TextSettings:
    """The run of a variant; the same name and seed are the same run, so it goes on where it stopped."""
    folder = options.runs / f"{name.replace(' ', '_').replace(',', '')}_{seed}"
    given = {"redraw_every": options.redraw_every, **VARIANTS[name][0]}
    if given.get("feature_map") in ("favor", "smreg"):
        given["feature_map_options"] = {given["feature_map"]: {"num_features": options.features}}
    return TextSettings(
        sources=(str(training),),
        out=folder,
        val=str(validation),
        seed=seed,
        context=options.context,
        hidden_size=options.hidden_size,
        layers=options.layers,
        heads=4,
        decay="none",
        position="sinusoidal",
        steps=options.steps,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        eval_every=options.eval_every,
        save_every=options.eval_every,
        keep=1,
        sample_tokens=0,
        resume=True,
        **given,
    )


def one_run(name: str, seed: int, training: Path, validation: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The log's validations, and what became of the run."""
    wanted, measure = variant(name, seed, training, validation, options), "validation_bits_per_byte"
    stopped = ""
    try:
        lines = trained(wanted, measure)
    except UserError as error:
        if "training stopped after step" not in str(error):
            raise
        # a loss that is no number is a result, too
        lines, stopped = validations(wanted.out, measure), str(error)
    return {
        "seed": seed,
        "steps": [line["step"] for line in lines],
        "bits_per_byte": [line[measure] for line in lines],
        "stopped": stopped,
    }


def report(options, facts, results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            len(runs),
            mean_and_error([*ends(runs).values()], ".3f"),
            mean_and_error([*ends(runs, min).values()], ".3f"),
            None if name == REFERENCE else against(runs, results.get(REFERENCE, [])),
            "stopped: not a number" if any(x["stopped"] for x in runs) else runs[-1]["steps"][-1],
        ]
        for name, runs in results.items()
    ]
    return page(
        "Byte-level language models of novels, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, 4 heads, {options.batch_size} × {options.context} bytes "
        f"per step; random features: {options.features} per head, redrawn every {options.redraw_every} steps where so named. "
        f"Bits per byte of the first {options.validation_bytes:,} bytes of {options.unseen}, which is not trained on. "
        + (
            "Means over the seeds ± their standard error; differences are taken seed by seed."
            if len(options.seeds) > 1
            else "One run each: differences of a few hundredths may be luck."
        ),
        markdown(["attention", "seeds", "bits per byte at the end", "lowest", f"more than {REFERENCE}", "steps"], rows),
    )


def ends(runs: list[dict[str, Any]], of=lambda bits: bits[-1]) -> dict[int, float]:
    """Seed → bits per byte at the end, or of the lowest, where there is any."""
    return {x["seed"]: of(x["bits_per_byte"]) for x in runs if x["bits_per_byte"]}


def against(runs: list[dict[str, Any]], reference: list[dict[str, Any]]) -> str | None:
    """The difference at the end, seed by seed."""
    here, there = ends(runs), ends(reference)
    return mean_and_error([here[seed] - there[seed] for seed in here if seed in there], "+.3f")


def figure(options, facts, results: dict[str, Any]):
    """Draw a line for each seed, with one name for all of a method."""
    made, (axes,) = panels(1, width=6.4, height=4.2)
    for name, runs in results.items():
        for x in runs:
            line(axes, zip(x["steps"], x["bits_per_byte"]), VARIANTS[name][1], name if x is runs[0] else None)
    label(axes, "steps", "bits per byte of an unseen novel", scales="linear linear")
    return made


if __name__ == "__main__":
    sys.exit(main())
