"""The attentions that the table compares: what each is called, what it sees, and the keys of its config."""

from collections.abc import Callable
from typing import Any, NamedTuple

import experiments.baselines  # noqa: F401  registers them
from scripts.common.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY


class Row(NamedTuple):
    attention: str
    sees: str = "either"  # "back": a causal kind alone; "both": a kind that is never causal
    of_length: Callable[[int], dict[str, Any]] = lambda length: {}  # options of it, for sequences up to that length
    more: dict[str, Any] = {}  # noqa: RUF012  other keys
    style: str = GREY
    leaks: bool = False  # as a decoder: which earlier keys a query sees depends on later tokens, so it is not causal

    def keys(self, length: int) -> dict[str, Any]:
        """Of the config of a model. Decays and positions belong to none of the papers' attentions: none, and sinusoidal."""
        options = self.of_length(length)
        return {
            "attention": self.attention,
            "attention_options": {self.attention: options} if options else {},
            "decay": "none",
            "position": "sinusoidal",
            **self.more,
        }


ROWS = {
    "softmax": Row("softmax", style=RED),
    "linear": Row("linear", more={"feature_map": "elu"}, style=BLUE),
    "Performer": Row("linear", more={"feature_map": "favor"}, style=SKY),
    "gated delta": Row("gated_delta", "back", more={"decay": "token"}, style=GREEN),
    "window + sinks": Row("baselines.window", style=ORANGE),
    "Reformer LSH": Row("baselines.lsh", style=f"{RED} --", leaks=True),
    "Sparse, strided": Row("baselines.sparse_strided", style=f"{BLUE} --"),
    "Sparse, fixed": Row("baselines.sparse_fixed", style=f"{BLUE} :"),
    "Longformer": Row("baselines.longformer", style=f"{SKY} --"),
    "BigBird": Row("baselines.bigbird", "both", style=f"{SKY} :"),
    "Routing": Row("baselines.routing", style=f"{GREEN} --", leaks=True),
    "clustered": Row("baselines.clustered", "both", style=f"{GREEN} :"),
    "improved clustered": Row("baselines.improved_clustered", "both", style=f"{GREEN} -."),
    "Transformer-XL": Row("baselines.transformer_xl", "back", style=f"{ORANGE} --"),
    "Compressive": Row("baselines.compressive", "back", style=f"{ORANGE} :"),
    "Linformer": Row("baselines.linformer", "both", lambda length: {"length": length}, style=f"{PINK} --"),
    "Nyström": Row("baselines.nystrom", "both", style=f"{PINK} :"),
    "Hydra": Row("baselines.hydra", style=PINK),
    "graph of distances 2ⁿ": Row("baselines.graph", "both", style=f"{GREY} --"),
    "none": Row("none", style=GREY),
}
MOST = ("softmax", "linear", "Performer", "gated delta", "window + sinks")  # the rows that matter most
SHOWN = (*MOST, "Longformer", "Linformer")  # those whose lines the picture has
