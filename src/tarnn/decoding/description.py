"""Facts about an opened model: its size, its layers, and the bytes of its states."""

from collections.abc import Sequence
from typing import Any

from tarnn.decoding.opened import Opened
from tarnn.ops import State

# of states; others are called by the names of their classes
KINDS = {
    "KVCache": "softmax",
    "RowCaches": "softmax",
    "NoState": "none",
    "GatedDeltaState": "gated_delta",
    "HybridState": "window",
}


def facts_of(opened: Opened, lengths: Sequence[int] = ()) -> dict[str, Any]:
    """Return the facts as JSON has them. lengths: numbers of tokens at which the bytes of one sequence are told.

    state_bytes + t · state_bytes_per_token is the state of t tokens. packed_bytes: of the step's own weights, where it has
    some; the totals are with these.
    """
    empty, one = (opened.new_state(1, capacity).layers for capacity in (0, 1))
    fixed, grown = (sum(x.nbytes for x in layers) for layers in (empty, one))
    packed = packed_bytes(opened.step) or opened.num_bytes
    return {
        "architecture": opened.architecture,
        "parameters": opened.num_parameters,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "weight_bytes": opened.num_parameters * opened.dtype.itemsize,
        "weights": opened.weights,
        "packed_bytes": packed,
        "vocab_size": opened.config.vocab_size,
        "max_position_embeddings": opened.config.max_position_embeddings,
        "end_ids": sorted(opened.end_ids),
        "sampling": dict(opened.sampling),
        "step": list(opened.about),
        "layers": [layer_facts(i, *states) for i, states in enumerate(zip(empty, one, strict=True))],
        "state_bytes": fixed,
        "state_bytes_per_token": grown - fixed,
        "memory": [
            {
                "length": length,
                "state_bytes": (state := fixed + length * (grown - fixed)),
                "total_bytes": packed + state,
                "softmax_state_bytes": (cache := length * opened.key_bytes),
                "softmax_total_bytes": packed + cache,
            }
            for length in lengths
        ],
    }


def layer_facts(number: int, empty: State, one: State) -> dict[str, Any]:
    """Return the kind of one state and its bytes; number: its place among the states."""
    name = type(one).__name__
    per_token = one.nbytes - empty.nbytes
    size = {"state_bytes_per_token": per_token} if per_token else {"state_bytes": one.nbytes}
    return {"layer": number, "attention": KINDS.get(name, name.removesuffix("State").lower()), **size}


def packed_bytes(step: Any) -> int:
    """Return the bytes of a step's own weights; 0 for one that has none."""
    return int(getattr(step, "nbytes", 0))
