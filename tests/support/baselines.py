"""The baselines of experiments/baselines with sizes small enough for definitions, and what their tests share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import experiments.baselines  # noqa: F401  registers them
from tarnn.attention.registry import ATTENTIONS

SIZES = {"hidden_size": 14, "num_heads": 4, "head_dim": 5}


class Row(NamedTuple):
    """A baseline as it is held to the laws. both, causal: the forms that it has; to_the_bit: whether the causal one is one."""

    name: str
    options: dict[str, Any]
    both: bool = True
    causal: bool = False
    to_the_bit: bool = True


# of 9 tokens, which gradients are checked with, none is old
MEMORIES = {"segment": 9, "memory": 9, "compressed": 2, "rate": 3}
ROWS = {
    "window": Row("baselines.window", {"window": 4, "sinks": 2}, causal=True),
    "lsh": Row("baselines.lsh", {"chunk": 3, "rounds": 2}, causal=True, to_the_bit=False),
    "lsh, one round": Row("baselines.lsh", {"chunk": 4, "rounds": 1, "num_kv_heads": 2}, causal=True, to_the_bit=False),
    "sparse, strided": Row("baselines.sparse_strided", {"stride": 4}, causal=True),
    "sparse, fixed": Row("baselines.sparse_fixed", {"stride": 4, "summaries": 2}, causal=True),
    "longformer": Row("baselines.longformer", {"reach": 3, "global_tokens": 2}, causal=True),
    "longformer, window alone": Row(
        "baselines.longformer", {"reach": 4, "global_tokens": 0, "num_kv_heads": 2}, causal=True
    ),
    "bigbird": Row("baselines.bigbird", {"block": 2, "random_blocks": 2}),
    "routing": Row("baselines.routing", {"clusters": 3, "reach": 3}, causal=True, to_the_bit=False),
    "low rank delta": Row("baselines.low_rank_delta", {"kernel": 3}, both=False, causal=True),
    "clustered": Row("baselines.clustered", {"clusters": 4, "bits": 9}),
    "improved clustered": Row("baselines.improved_clustered", {"clusters": 4, "top_keys": 3, "bits": 9}),
    "transformer-xl": Row("baselines.transformer_xl", {"segment": 10, "memory": 7}, both=False, causal=True),
    "compressive": Row("baselines.compressive", MEMORIES, both=False, causal=True),
    "compressive, pooled": Row(
        "baselines.compressive", {**MEMORIES, "compression": "max", "num_kv_heads": 2}, both=False, causal=True
    ),
    "linformer": Row("baselines.linformer", {"length": 20, "projected": 4}),
    "linformer, by head": Row(
        "baselines.linformer", {"length": 20, "projected": 4, "shared": "none", "num_kv_heads": 2}
    ),
    "nystrom": Row("baselines.nystrom", {"landmarks": 4, "conv_kernel": 5}),
    "nystrom, many landmarks": Row("baselines.nystrom", {"landmarks": 16, "conv_kernel": 0, "num_kv_heads": 2}),
    "hydra": Row("baselines.hydra", {"num_kv_heads": 2}, causal=True),
    "graph of distances": Row("baselines.graph", {"num_kv_heads": 2}),
    "graph": Row("baselines.graph", {"edges": [(0, 1), (3, 1), (4, 17), (18, 30)]}),
}
CAUSAL = {name: row for name, row in ROWS.items() if row.causal}


def build(row: Row, causal: bool = False, **more: Any) -> Any:
    """The row's module in float64, with weights large enough that attention differs from a mean."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**SIZES, **row.options, **more}
    named = ATTENTIONS.find(row.name)
    module = named.kind(causal=causal, **{**named.implied, **options}).double().eval()
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("_proj.weight"):
                p.normal_(std=0.6)
    return module


def inputs(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def masked_softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> Tensor:
    """The definition that most are held against: softmax over the keys of a dense mask (b, h, t, s); zeros where it has none."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = (scale * q @ k.mT).masked_fill(~seen, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0) @ v


def past(t: int) -> Tensor:
    return torch.ones(t, t, dtype=torch.bool).tril()


def mixed(layer: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the heads make of these queries, keys and values (b, h, t, e), where nothing is masked."""
    names = ("key_mask", "cu_seqlens", "positions", "rotation", "state")
    return layer.mix(x, q, k, v, **dict.fromkeys(names), return_state=False, inplace=False)[0]


def pieces(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and real, as `attend` gets them where nothing is masked."""
    return *layer.project(x, x), torch.ones(x.shape[:2], dtype=torch.bool)
