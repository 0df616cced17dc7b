"""Feature maps, and hybrid attention over them, as numbers in the order in which csrc/runtime reads them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tarnn.program.feature_functions import FUNCTIONS as MAPS
from tarnn.program.instructions import Instruction

_NUMBERS = (("square", 0.0), ("offset", 0.0), ("gain", 1.0), ("shift", 0.0), ("number", float("-inf")))
PLAIN = [default for _, default in _NUMBERS]


class Numbers(NamedTuple):
    """Integers, numbers and vectors of an operation, and its matrices of heads, weight and bias."""

    integers: list[int]
    numbers: list[float]
    vectors: list[Tensor | None]
    heads: list[tuple[Tensor, Tensor | None]]


def map_numbers(numbers: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Numbers:
    """Return the numbers of a feature map, by the options and weights of an instruction `features`."""
    omega, bias, moves = weights.get("omega"), weights.get("bias"), weights.get("centre")
    integers = [MAPS.index(str(numbers["function"])), *((0, 0) if omega is None else omega.shape[:2])]
    parts = numbers.get("parts")
    vectors: list[Tensor | None] = [torch.tensor(parts) if parts else None]
    names = ("centre", "stretch", "weight", "constant")
    vectors += [None if moves is None else weights[name].flatten() for name in names]
    heads = [] if omega is None else [(omega, None if bias is None else bias.expand(len(omega), -1))]
    return Numbers(
        [*integers, 0 if moves is None else len(moves)],
        [float(numbers.get(name, default)) for name, default in _NUMBERS],
        vectors,
        heads,
    )


def hybrid_numbers(x: Instruction, num_features: int) -> Numbers:
    """Return the numbers of hybrid attention, and behind them those of both maps, if there are features."""
    n: Mapping[str, Any] = x.numbers
    far_until = float("inf") if n["far_until"] < 0 else float(n["far_until"])
    scale = float(n["scale"]) * x.inputs[0].width ** 0.5
    integers = [n["sinks"] + n["window"], n["sinks"], num_features, int(n["log_features"]), *n["reach"]]
    made = Numbers(integers, [relative(scale), far_until], [], [])
    if num_features:
        made.vectors.append(x.weights.get("far_bias"))
        for side in ("queries", "keys"):
            one = map_numbers(_under(f"{side}.", n), _under(f"{side}.", x.weights))
            made.integers.extend(one.integers)
            made.numbers.extend(one.numbers)
            made.vectors.extend(one.vectors)
            made.heads.extend(one.heads)
    return made


def relative(scale: float) -> float:
    """Return what scores are multiplied with beyond 1/√d: 1 but for rounding is 1."""
    return 1.0 if abs(scale - 1) < 1e-6 else scale


def _under(prefix: str, some: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): x for name, x in some.items() if name.startswith(prefix)}
