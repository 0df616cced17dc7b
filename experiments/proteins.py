"""Language models of proteins: table 2 of the Performer paper, and its concatenated sequences of 8,192 residues, in small.

    python experiments/proteins.py --data FOLDER            # killed, it goes on
    python experiments/proteins.py --data FOLDER --quick

Unidirectional models guess the next residue, bidirectional ones the 15 % that are masked (of these, in training, a tenth is
another residue and a tenth the right one). Attention is all that differs: softmax; Performer-softmax, drawn once;
Performer-ReLU; elu + 1. Positions are added to the embedding, and nothing decays. Beside them stands the empirical
baseline, which knows how frequent each residue is and nothing else.

FOLDER holds uniprot_20k.fasta.gz and two families that are held out, globins45.fasta and Pkinase_PF00069_seed.sto. What is
named after these families, or shares three words of six residues with them, is left out of training. OOD ("out of
distribution") are sequences of these families; Test are some of the others that are not trained on.
Then: seconds and memory of a training step on concatenated sequences, 8,192 residues in one row.

Choromanski et al. 2021 (arXiv 2009.14794), section 4.4, appendix C.
"""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures import protein_models
from measures.families import words_of
from measures.protein_models import ATTENTION, IGNORED, PAPER, Data, build, empirical, logits_of, task, trained, windows

from scripts.common.clock import Contender, Effort, measure_in_turns
from scripts.common.options import parse
from scripts.common.plots import label, line, panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mebibytes, milliseconds, page
from tarnn.data.proteins import read_proteins

FULL = {**protein_models.FULL, "long": 8192, "runs": Path("runs/proteins")}
QUICK = {**protein_models.QUICK, "long": 256}
FAMILIES = ("globins45.fasta", "Pkinase_PF00069_seed.sto")
NAMED = ("globin", "protein kinase")
SHARED = 3  # words


def main() -> int:
    only = {"only": list(ATTENTION), "directions": list(PAPER)}
    choices = {"only": list(ATTENTION), "directions": list(PAPER)}
    options = parse(__file__, __doc__, FULL | only, QUICK, choices=choices)
    return run(options, measure, results={"sequences": {}, "models": {}, "long": {}}, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the sequences are.")
    data = split(options)
    results["sequences"] = data.facts
    for direction in options.directions:
        found = results["models"].setdefault(direction, {"empirical": empirical(data)})
        for name in options.only:
            found[name] = trained(direction, name, data, options)
            keep()
    if options.long:
        results["long"] = long_steps(data, options)


def split(options) -> Data:
    """Training sequences, some that are held out at random, and the families that are."""
    families = [x for name in FAMILIES for x in read_proteins(options.data / name)]
    words = set().union(*(words_of(x.sequence) for x in families))
    everything, rest, strange = {}, [], []
    for protein in read_proteins(options.data / "uniprot_20k.fasta.gz"):
        everything.setdefault(protein.sequence, protein)
    for protein in everything.values():
        if any(name in protein.name.lower() for name in NAMED):
            strange.append(protein)
        elif len(words_of(protein.sequence) & words) < SHARED:
            rest.append(protein)
    random.Random(0).shuffle(rest)
    test, kept = rest[: options.test_sequences], rest[options.test_sequences :]
    random.Random(0).shuffle(ood := families + strange)
    left_out = len(everything) - len(rest) - len(strange)
    return Data.of(kept, test, ood[: options.test_sequences], **{"left out, like those": left_out})


def long_steps(data: Data, options) -> dict[str, Any]:
    """Seconds and memory of one training step on one row of `long` residues, sequences end to end."""
    contenders = {}
    for direction in options.directions:
        for name in options.only:
            model = build(direction, name, options)
            inputs, targets = task(direction, windows(data.train, options.long, 1, 0), torch.Generator().manual_seed(0))

            def step(model=model, inputs=inputs, targets=targets) -> None:
                logits = logits_of(model, inputs)
                cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED).backward()
                model.zero_grad()

            contenders[f"{direction}, {name}"] = Contender(step, patience=2.0)
    effort = Effort(seconds=0.1, rounds=(1, 1)) if options.quick else Effort(seconds=4.0, rounds=(3, 5))
    return measure_in_turns(contenders, effort)


def report(options, facts, results: dict[str, Any]) -> str:
    tables = []
    for direction, found in results["models"].items():
        rows = []
        for name, one in found.items():
            paper = PAPER[direction].get(name, (None,) * 4)
            ours = [one[part][what] for part in ("test", "ood") for what in ("accuracy", "perplexity")]
            rows.append([name, *(f"{x:.2f}" for x in ours), *paper])
        header = [direction, *(f"{part} {what}" for part in ("Test", "OOD") for what in ("accuracy", "perplexity"))]
        tables.append(markdown([*header, *(f"paper: {x}" for x in header[1:])], rows))
    speed = [[name, milliseconds(timing), mebibytes(timing.peak_bytes, 0)] for name, timing in results["long"].items()]
    return page(
        "Language models of proteins, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, {options.steps} steps of "
        f"{options.batch_size} × {options.context} residues; the paper: 36 layers, hidden 512, TrEMBL. "
        + ", ".join(f"{name}: {number:,}" for name, number in results["sequences"].items())
        + ". One run each.",
        *tables,
        markdown([f"a training step on {options.long:,} concatenated residues", "ms", "MiB"], speed) if speed else "",
    )


def figure(options, facts, results: dict[str, Any]):
    made, every = panels(len(results["models"]), height=4.2)
    for axes, (direction, found) in zip(every, results["models"].items()):
        for name, one in found.items():
            if "curve" in one:
                line(axes, [(x["step"], x["perplexity"]) for x in one["curve"]], ATTENTION[name][1], name)
        label(axes, "steps", "perplexity, 50 test sequences", scales="linear linear", title=direction)
    return made


if __name__ == "__main__":
    raise SystemExit(main())
