"""Proteins of known and of unknown families: the two halves of table 2 of the Performer paper, with families in training.

    python experiments/protein_families.py --data FOLDER        # killed, it goes on
    python experiments/protein_families.py --data FOLDER --quick

experiments/proteins.py holds whole families out. Here families are trained on: *Test* are single members of families whose
other members are trained on, *OOD* are families of which no member is. The sequences carry no family names, so a family is a
cluster (`measures/families.py`): sequences that share a tenth of the shorter one's words of six residues, and all that are
linked by such pairs. Most sequences are alone; they are trained on. The 500 queries take part, each once.

FOLDER as of experiments/proteins.py, with uniprot_queries_500.fasta.gz. Choromanski et al. 2021 (arXiv 2009.14794), section 4.4.
"""

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures import protein_models
from measures.families import families
from measures.intervals import Errors, Interval, interval
from measures.protein_models import ATTENTION, PAPER, Data, empirical, trained

from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, mean_and_error, page
from tarnn.data.proteins import read_proteins

FILES = ("uniprot_20k.fasta.gz", "uniprot_queries_500.fasta.gz")
FULL = {**protein_models.FULL, "seeds": [0, 1, 2], "held_out": 20, "least": 4, "runs": Path("runs/protein_families")}
QUICK = {**protein_models.QUICK, "seeds": [0], "held_out": 1, "least": 2}
PARTS = {"test": "Test: members of known families", "ood": "OOD: unknown families"}


def main() -> int:
    lists = {"only": list(ATTENTION), "directions": list(PAPER)}
    about = {"held_out": "whole families that are not trained on", "least": "members that a family has"}
    options = parse(__file__, __doc__, FULL | lists, QUICK, choices=lists, about=about)
    return run(options, measure, results={"sequences": {}, "models": {}}, report=report)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the sequences are.")
    data = split(options)
    results["sequences"] = data.facts
    for direction in options.directions:
        found = results["models"].setdefault(direction, {"empirical": {"0": empirical(data)}})
        for seed in options.seeds:
            for name in options.only:
                one = trained(direction, name, data, options, seed)
                found.setdefault(name, {})[str(seed)] = one
                keep()


def split(options) -> Data:
    """`held_out` families as a whole, one member of each other family, and all the rest to train on."""
    known = {x.sequence: x for name in FILES for x in read_proteins(options.data / name)}
    every = sorted(known.values(), key=lambda x: x.sequence)
    groups = [group for group in families([x.sequence for x in every]) if len(group) >= options.least]
    random.Random(0).shuffle(groups)
    strange, rest = groups[: options.held_out], groups[options.held_out :]
    ood = [i for group in strange for i in group]
    members = [random.Random(0).choice(group) for group in rest]
    kept = sorted(set(range(len(every))) - set(ood) - set(members))
    random.Random(0).shuffle(ood)
    test, out = members[: options.test_sequences], ood[: options.test_sequences]
    parts = ([every[i] for i in numbers] for numbers in (kept, test, out))
    return Data.of(*parts, **{"families": len(groups), "in families": sum(map(len, groups))})


def differences(found: dict[str, Any]) -> list[list[str]]:
    """Unknown minus known families of each model, and each model minus the first, with intervals over proteins and seeds."""
    models = {name: seeds for name, seeds in found.items() if name != "empirical"}
    rows = {f"{name}: OOD − Test": apart(nats(seeds, "ood"), nats(seeds, "test")) for name, seeds in models.items()}
    first = next(iter(models))
    for name in list(models)[1:]:
        for part in PARTS:
            rows[f"{name} − {first}, {part}"] = nats(models[name], part).above(nats(models[first], part))
    shown = {name: [x / 100 for x in found] for name, found in rows.items()}
    return [[name, f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}"] for name, (mean, low, high) in shown.items()]


def nats(seeds: dict[str, Any], part: str) -> Errors:
    return Errors([one[part]["nats"] for one in seeds.values()], next(iter(seeds.values()))[part]["residues"])


def apart(one: Errors, other: Errors) -> Interval:
    """The difference of two rates over different proteins, whose draws have nothing to do with each other."""
    return interval(one.rate().mean - other.rate().mean, one.draws(0) - other.draws(1)[::-1])


def report(options, facts, results: dict[str, Any]) -> str:
    tables = []
    for direction, found in results["models"].items():
        rows = []
        for name, seeds in found.items():
            paper = PAPER[direction].get(name, (None,) * 4)
            ours = [
                mean_and_error([one[part][what] for one in seeds.values()], ".2f")
                for part in PARTS
                for what in ("accuracy", "perplexity")
            ]
            rows.append([name, len(seeds), *ours, *paper])
        header = [f"{part} {what}" for part in ("Test", "OOD") for what in ("accuracy", "perplexity")]
        tables.append(markdown([direction, "seeds", *header, *(f"paper: {x}" for x in header)], rows))
        tables.append(markdown(f"{direction}: nats a residue | difference | 95 %", differences(found)))
    return page(
        "Proteins of known and of unknown families, by attention",
        f"{options.layers} layers, hidden {options.hidden_size}, {options.heads} heads, {options.steps} steps of "
        f"{options.batch_size} × {options.context} residues. "
        + ". ".join(PARTS.values())
        + ". "
        + ", ".join(f"{name}: {number:,}" for name, number in results["sequences"].items())
        + ". Means over seeds ± standard errors.",
        *tables,
    )


if __name__ == "__main__":
    raise SystemExit(main())
