"""Amino acids by attention, beside BLOSUM62; and the attention to BPT1_BOVIN: figures 13 and 14 of the Performer paper.

    python experiments/amino_acids.py --data FOLDER         # after experiments/proteins.py, whose models it reads
    python experiments/amino_acids.py --data FOLDER --quick

Two kinds of residues are alike where the same heads attend to both: Pearson's correlation, over all heads, of the share of
attention that each gets, summed over sequences. How alike they are in evolution says BLOSUM62. What the same models say
before training stands beside it: what is there already is no knowledge.

FOLDER as of experiments/proteins.py, with BLOSUM62.txt and BPT1_BOVIN.fasta.
Choromanski et al. 2021 (arXiv 2009.14794), appendix C.4; Vig et al. 2021 (arXiv 2006.15222).
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import proteins
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from measures.protein_models import ATTENTION, PAPER, build, folder_of, ids_of
from measures.residues import agreement, attention_to_residues, chance, closest, read_matrix, similarity

from scripts.common.options import parse
from scripts.common.plots import panels
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.analysis.attention_maps import attention_maps
from tarnn.data.proteins import AMINO_ACIDS, read_proteins

SHOWN = ("bidirectional", "Performer-ReLU")  # in the figure


def main() -> int:
    lists = {"only": list(ATTENTION), "directions": list(PAPER)}
    options = parse(
        __file__,
        __doc__,
        proteins.FULL | lists,
        proteins.QUICK,
        choices=lists,
        about={"runs": "the runs of experiments/proteins.py"},
    )
    return run(options, measure, report=report, figure=figure)


def measure(options, results: dict[str, Any], keep) -> None:
    if options.data is None:
        raise Unmeasured("--data FOLDER says where the sequences are.")
    rows = [torch.from_numpy(x[: options.context]) for x in proteins.split(options).test]
    blosum = read_matrix(options.data / "BLOSUM62.txt")
    results["BLOSUM62"] = {"closest": closest(blosum), "matrix": blosum.tolist()}
    for direction in options.directions:
        for name in options.only:
            path = folder_of(direction, name, options) / "checkpoint.pt"
            if not path.exists():
                raise Unmeasured(f"{path} is not there; experiments/proteins.py makes it, with the same settings.")
            model, found = build(direction, name, options).eval(), {}
            more = {"use_cache": False} if model.config.causal else {}
            for when in ("before", "after"):
                if when == "after":
                    model.load_state_dict(torch.load(path, weights_only=True)["model"])
                matrix = similarity(attention_to_residues(model, rows, **more))
                found[when] = {
                    "agreement": agreement(matrix, blosum),
                    "closest": closest(matrix),
                    "matrix": matrix.tolist(),
                }
            results[f"{direction}, {name}"] = found
            keep()


def report(options, facts, results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(f"{found[when]['agreement']:.2f}" for when in ("before", "after")),
            f"{chance(np.array(found['after']['matrix']), np.array(results['BLOSUM62']['matrix'])):.3f}",
            " ".join(found["after"]["closest"]),
        ]
        for name, found in results.items()
        if "after" in found
    ]
    return page(
        "Amino acids by attention",
        f"Pearson's correlation with BLOSUM62 over the 190 pairs of different amino acids, of their similarity by attention in "
        f"{options.test_sequences} test sequences, before and after training ({options.steps} steps of "
        f"{options.batch_size} × {options.context} residues). p: how often shuffled residues agree as much. "
        "BLOSUM62's own closest pairs: "
        f"{' '.join(results['BLOSUM62']['closest'])}.",
        markdown(["model", "before training", "after", "p", "closest pairs after training"], rows),
    )


def figure(options, facts, results: dict[str, Any]):
    """Both similarities, and the attention of a trained model to BPT1_BOVIN, head by head, in its last layer."""
    direction, name = SHOWN if ", ".join(SHOWN) in results else list(results)[-1].split(", ")
    model = build(direction, name, options).eval()
    path = folder_of(direction, name, options) / "checkpoint.pt"
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    protein = next(read_proteins(options.data / "BPT1_BOVIN.fasta"))
    more = {"use_cache": False} if model.config.causal else {}
    weights = attention_maps(model, input_ids=torch.from_numpy(ids_of(protein))[None], **more)[-1].weights()[0]
    made, axes = panels(2 + min(4, len(weights)), f"{direction} {name}", width=3.4, height=3.8)
    for one, matrix, title in (
        (axes[0], results[f"{direction}, {name}"]["after"]["matrix"], "similarity by attention"),
        (axes[1], results["BLOSUM62"]["matrix"], "BLOSUM62"),
    ):
        shown = np.array(matrix)
        np.fill_diagonal(shown, np.nan)
        one.imshow(shown, cmap="Blues")
        one.set_xticks(range(20), AMINO_ACIDS, fontsize=6)
        one.set_yticks(range(20), AMINO_ACIDS, fontsize=6)
        one.set_title(title, fontsize="small")
    for head, one in enumerate(axes[2:]):
        one.imshow(weights[head].numpy(), cmap="Blues")
        one.set_title(f"BPT1_BOVIN, last layer, head {head}", fontsize="small")
    return made


if __name__ == "__main__":
    raise SystemExit(main())
