"""Papers of the Cora graph, by linear attention over all of them, by attention along citations, and by both.

    python experiments/graph_nodes.py                 # minutes; data from ../shared/data/cora
    python experiments/graph_nodes.py --data FOLDER   # that holds cora.npz

Each paper is a node with the words that it uses; 140 of the 2,708 have a label to learn from. All nodes are one sequence
without positions. Linear attention sees all pairs of nodes and no edge; graph attention (Veličković et al. 2018, arXiv
1710.10903) sees edges alone. The test is taken at the step that is best on 500 other papers. A recipe, and no record.
"""

import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from experiments.baselines.graph import GraphAttention
from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn import LinearAttention

KINDS = {
    "words alone": (False, False),
    "linear attention, all pairs": (True, False),
    "graph attention, citations": (False, True),
    "both": (True, True),
}
FULL = {
    "steps": 200,
    "seeds": 5,
    "hidden": 64,
    "heads": 4,
    "layers": 2,
    "dropout": 0.6,
    "learning_rate": 5e-3,
    "weight_decay": 5e-3,
    "data": Path(__file__).parents[2] / "shared" / "data" / "cora",
}
QUICK = {"steps": 2, "seeds": 2, "hidden": 8, "heads": 2}


class Graph(NamedTuple):
    words: Tensor  # (1, n, w): the share of each word in each paper
    labels: Tensor  # (n,)
    edges: Tensor  # (e, 2)
    parts: dict[str, Tensor]  # "train", "valid", "test": indices of nodes


class Layer(nn.Module):
    """x + the attentions of norm(x), and then x + a feed-forward of norm(x)."""

    def __init__(self, options, all_pairs: bool, edges: Tensor | None):
        super().__init__()
        sizes = {"hidden_size": options.hidden, "num_heads": options.heads, "causal": False}
        attentions = [LinearAttention(**sizes)] if all_pairs else []
        self.attentions = nn.ModuleList(attentions + ([] if edges is None else [GraphAttention(**sizes, edges=edges)]))
        self.mlp = nn.Sequential(nn.Linear(options.hidden, options.hidden), nn.GELU(), nn.Dropout(options.dropout))
        self.norms = nn.ModuleList(nn.LayerNorm(options.hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + sum(attention(y) for attention in self.attentions)
        return x + self.mlp(self.norms[1](x))


def main() -> int:
    return run(parse(__file__, __doc__, FULL, QUICK), measure, report=report)


def read(folder: Path) -> Graph:
    path = folder / "cora.npz"
    if not path.exists():
        raise Unmeasured(f"there is no {path.name} in {folder}; --data FOLDER says where it is")
    with np.load(path) as z:
        start, labels = z["feature_indptr"], torch.from_numpy(z["labels"].astype(np.int64))
        words = np.zeros((len(labels), int(z["num_features"])), np.float32)
        words[np.repeat(np.arange(len(labels)), np.diff(start)), z["feature_indices"]] = 1
        parts = {name: torch.from_numpy(z[f"{name}_idx"].astype(np.int64)) for name in ("train", "valid", "test")}
        edges = torch.from_numpy(z["edges"].astype(np.int64))
    words /= words.sum(1, keepdims=True).clip(1)
    return Graph(torch.from_numpy(words)[None], labels, edges, parts)


def measure(options, found: dict[str, Any], keep) -> None:
    graph = read(options.data)
    for name, (all_pairs, along_edges) in KINDS.items():
        runs = []
        for seed in range(options.seeds):
            torch.manual_seed(seed)
            runs.append(trained(graph, options, all_pairs, graph.edges if along_edges else None))
            print(f"{name:28} seed {seed}  {runs[-1]:5.1f} % of the test", flush=True)
        found[name] = {"test": runs}
        keep()


def trained(graph: Graph, options, all_pairs: bool, edges: Tensor | None) -> float:
    """Per cent of the test papers that are right, at the step that is best on the validation papers."""
    classes = int(graph.labels.max()) + 1
    layers = [Layer(options, all_pairs, edges) for _ in range(options.layers)]
    first = [nn.Dropout(options.dropout), nn.Linear(graph.words.shape[-1], options.hidden), nn.Dropout(options.dropout)]
    model = nn.Sequential(*first, *layers, nn.LayerNorm(options.hidden), nn.Linear(options.hidden, classes))
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    best = (-1.0, 0.0)
    for _ in range(options.steps):
        model.train()
        logits, train = model(graph.words)[0], graph.parts["train"]
        optimizer.zero_grad()
        cross_entropy(logits[train], graph.labels[train]).backward()
        optimizer.step()
        with torch.no_grad():
            right = (model.eval()(graph.words)[0].argmax(-1) == graph.labels).double()
        best = max(
            best, tuple(100 * right[graph.parts[name]].mean().item() for name in ("valid", "test")), key=lambda x: x[0]
        )
    return best[1]


def report(options, facts, found: dict[str, Any]) -> str:
    rows = []
    for name, runs in found.items():
        values = runs["test"]
        rows.append([name, f"{statistics.mean(values):.1f}", f"{min(values):.1f} to {max(values):.1f}"])
    return page(
        "Nodes of a graph",
        f"Cora: {options.layers} layers, {options.hidden} wide, {options.heads} heads, {options.steps} steps of all nodes; "
        f"{options.seeds} seeds.",
        markdown(["what a node sees", "test, %", "least to most"], rows),
    )


if __name__ == "__main__":
    raise SystemExit(main())
