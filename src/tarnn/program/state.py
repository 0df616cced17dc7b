"""States of programs as values: a `ModelState`, whose layers are of the classes that models in PyTorch have, so that files of
states are the same for both.

Keys and values are kept for each row by itself (`RowCaches`), as many as the row has seen tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tarnn.large_pages import zeros_in_large_pages
from tarnn.models.state import ModelState
from tarnn.ops import KVCache, State
from tarnn.ops.softmax.cache import RowCaches, full
from tarnn.program.instructions import Program, StateSpec

CLASSES = {  # of a layer's state → its module, loaded when a program has such a layer
    "NoState": "tarnn.ops.state",
    "KVCache": "tarnn.ops.softmax.cache",
    "LinearState": "tarnn.ops.states",
    "DeltaState": "tarnn.ops.states",
    "ConvolutionState": "tarnn.ops.states",
    "HybridState": "tarnn.ops.states",
    "FilteredScanState": "tarnn.ops.states",
    "GatedDeltaState": "tarnn.attention.gated_delta",
    "Mamba2State": "tarnn.attention.mamba2",
    "Rwkv7State": "tarnn.attention.rwkv7_layer",
    "RwkvState": "tarnn.attention.token_shift",
}


def class_of(kind: str) -> Any:
    """Return the class of a layer's state by its name."""
    return getattr(import_module(CLASSES[kind]), kind)


def new_state(
    program: Program, rows: int, capacity: int = 0, *, cache_dtype: torch.dtype = torch.float32
) -> ModelState:
    """Make the state before the first token. capacity: tokens that each row's keys and values have room for."""
    layers: list[State] = []
    for kind, specs in layers_of(program):
        if kind == "KVCache":
            k, v = (
                specs[0],
                specs[1] if len(specs) > 1 else replace(specs[0], name="v", shape=(*specs[0].shape[:-1], 0)),
            )
            caches = (KVCache(_zeros(k, capacity, cache_dtype), _zeros(v, capacity, cache_dtype)) for _ in range(rows))
            layers.append(RowCaches(tuple(caches)))
        else:
            fields = {x.name: torch.full((rows, *x.shape), x.fill, dtype=x.dtype, device="cpu") for x in specs}
            if kind == "HybridState":  # nothing fades, and there are no slots
                fade, score = torch.zeros(fields["k"].shape[:3]), torch.empty(*fields["k"].shape[:2], 0)
                fields |= {"fade": fade, "score": score, "place": score.long()}
            layers.append(class_of(kind)(**fields))
    return ModelState(tuple(layers), torch.zeros(rows, dtype=torch.int64, device="cpu"))


def tensors_of(state: ModelState, program: Program) -> list[Tensor]:
    """List the tensors that a step writes, in the order of `program.states`.

    A state that grows with tokens has one tensor (1, …) for each row, row after row; all others have one (rows, …).
    """
    tensors: list[Tensor] = []
    for spec in program.states:
        layer = state.layers[spec.layer]
        parts = layer.rows if isinstance(layer, RowCaches) else (layer,)
        tensors += [getattr(x, spec.name) for x in parts]
    return tensors


def lengths_of(state: ModelState) -> tuple[list[int], list[int]]:
    """Return how many keys each row of a checked state has, and how many each has room for; empty without caches."""
    layers = [x.rows for x in state.layers if isinstance(x, RowCaches)]
    room = [min(x.capacity for x in row) for row in zip(*layers, strict=True)]
    return [x.length for x in layers[0]] if layers else [], room


def check_state(state: ModelState, program: Program, rows: int, counts: Sequence[int] = ()) -> None:
    """Raise ValueError for a state that a step of `program` can't write: of another model, or of another number of rows.

    counts: tokens that will be read of each row; ValueError where its keys and values have no room for them.
    """
    position, expected = state.position, len(program.layers)
    if position.shape != (rows,) or position.dtype != torch.int64 or len(state.layers) != expected:
        raise ValueError(
            f"the state has {len(state.layers)} layers and {len(position)} rows; this program has {expected} layers, and there "
            f"are {rows} rows of tokens. Make the state by its new_state({rows})."
        )
    for layer, (kind, specs) in zip(state.layers, layers_of(program), strict=True):
        caches = layer.rows if isinstance(layer, RowCaches) else ()
        wanted = RowCaches if kind == "KVCache" else class_of(kind)
        parts = [(x, 1) for x in caches] if kind == "KVCache" else [(layer, rows)]
        fits = type(layer) is wanted and len(parts) == (rows if kind == "KVCache" else 1)
        fits = fits and (kind == "HybridState" or _names(layer) <= {spec.name for spec in specs})
        if not fits or not all(_fits(getattr(x, spec.name), spec, n, x) for x, n in parts for spec in specs):
            shapes = ", ".join(f"{x.name} {(rows, *x.shape)}" for x in specs)
            raise ValueError(
                f"a layer of the state is {layer!r}; expected {wanted.__name__} with {shapes}, contiguous, on the CPU. Make "
                f"the state by this program's new_state({rows})."
            )
        if [x.length for x in caches] != position.tolist() * bool(caches):
            raise ValueError(
                f"rows have as many keys as they have seen tokens; got {[x.length for x in caches]} keys at positions "
                f"{position.tolist()}."
            )
        for cache, count in zip(caches, counts):
            if cache.length + count > cache.capacity:
                raise full(cache.capacity, cache.length, count)


def advanced(state: ModelState, counts: Iterable[int]) -> ModelState:
    """Return the state once the keys and values of so many tokens of each row were written behind those of its caches."""
    counts = list(counts)

    def longer(layer: State) -> State:
        if not isinstance(layer, RowCaches):
            return layer
        rows = zip(layer.rows, counts, strict=True)
        return RowCaches(tuple(replace(x, length=x.length + n) for x, n in rows))

    return replace(state, layers=tuple(map(longer, state.layers)))


def by_row(state: ModelState) -> ModelState:
    """Give each row keys and values of its own, without those that a mask excludes; without a mask they share memory."""
    return replace(state, layers=tuple(RowCaches.of(x) if isinstance(x, KVCache) else x for x in state.layers))


def joined(state: ModelState) -> ModelState:
    """Give all rows one tensor of keys and one of values, as models in PyTorch have them: the inverse of `by_row`.

    Where rows differ in length, a mask excludes what the shorter ones lack.
    """
    layers = (x.joined() if isinstance(x, RowCaches) and x.rows else x for x in state.layers)
    return replace(state, layers=tuple(layers))


def layers_of(program: Program) -> Iterator[tuple[str, list[StateSpec]]]:
    """Each layer's kind and tensors."""
    specs: list[list[StateSpec]] = [[] for _ in program.layers]
    for x in program.states:
        specs[x.layer].append(x)
    yield from zip(program.layers, specs, strict=True)


def _names(layer: State) -> set[str]:
    """The tensors of a layer's state itself."""
    return {name for name, x in vars(layer).items() if isinstance(x, Tensor)}


def _zeros(spec: StateSpec, capacity: int, dtype: torch.dtype) -> Tensor:
    """Make the keys or values of one row."""
    return zeros_in_large_pages(torch.empty(_shape(spec, 1, capacity), dtype=dtype, device="cpu"))


def _shape(spec: StateSpec, rows: int, capacity: int) -> tuple[int, ...]:
    return rows, *(capacity if axis == spec.grows else n for axis, n in enumerate(spec.shape))


def _fits(x: Tensor, spec: StateSpec, rows: int, part: State) -> bool:
    """Whether a tensor is as the program declares it; keys and values may be bfloat16."""
    capacity = part.capacity if isinstance(part, KVCache) else 0
    types = (spec.dtype,) if spec.grows is None else (spec.dtype, torch.bfloat16)
    return x.shape == _shape(spec, rows, capacity) and x.dtype in types and x.device.type == "cpu" and x.is_contiguous()
