"""The attentions that the table compares: what each is called, what it sees, and the keys of its config."""

from collections.abc import Callable
from typing import Any, NamedTuple

import experiments.rivals  # noqa: F401  registers them
from scripts.common.plots import BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY


class Row(NamedTuple):
    attention: str
    sees: str = "either"  # "back": a causal kind alone; "both": a kind that is never causal
    of_length: Callable[[int], dict[str, Any]] = lambda length: {}  # options of it, for sequences up to that length
    more: dict[str, Any] = {}  # noqa: RUF012  other keys
    style: str = GREY

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
    "window + sinks": Row("rivals.window", style=ORANGE),
    "Reformer LSH": Row("rivals.lsh", style=f"{RED} --"),
    "Sparse, strided": Row("rivals.sparse_strided", style=f"{BLUE} --"),
    "Sparse, fixed": Row("rivals.sparse_fixed", style=f"{BLUE} :"),
    "Longformer": Row("rivals.longformer", style=f"{SKY} --"),
    "BigBird": Row("rivals.bigbird", "both", style=f"{SKY} :"),
    "Routing": Row("rivals.routing", style=f"{GREEN} --"),
    "clustered": Row("rivals.clustered", "both", style=f"{GREEN} :"),
    "improved clustered": Row("rivals.improved_clustered", "both", style=f"{GREEN} -."),
    "Transformer-XL": Row("rivals.transformer_xl", "back", style=f"{ORANGE} --"),
    "Compressive": Row("rivals.compressive", "back", style=f"{ORANGE} :"),
    "Linformer": Row("rivals.linformer", "both", lambda length: {"length": length}, style=f"{PINK} --"),
    "Nyström": Row("rivals.nystrom", "both", style=f"{PINK} :"),
    "Hydra": Row("rivals.hydra", style=PINK),
    "graph of distances 2ⁿ": Row("rivals.graph", "both", style=f"{GREY} --"),
    "none": Row("none", style=GREY),
}
MOST = ("softmax", "linear", "Performer", "gated delta", "window + sinks")  # the rows that matter most
