"""The functions that feature maps are made of, by name, and how many features each makes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tarnn.kernels.features import NAMES

# as csrc/runtime/feature_map.h has them
OTHERS = ("abs", "sigmoid", "gelu", "cos", "plain_exp", "waves", "halves", "dpfp", "pairs", "cosformer", "log_softmax")
FUNCTIONS = (*NAMES, *OTHERS)


def width_of(function: str, d: int, omega: Tensor | None, numbers: Mapping[str, Any]) -> int:
    """Return the number of features of a head of d channels. numbers: `number` of dpfp (ν), `parts` of pairs."""
    m = d if omega is None else omega.shape[1]
    if function not in FUNCTIONS:
        raise ValueError(f"{function} is none of the functions of feature maps: {', '.join(FUNCTIONS)}.")
    if function in ("waves", "halves", "cosformer"):
        return 2 * m
    if function == "dpfp":
        return 2 * d * int(numbers["number"])
    if function == "pairs":
        leads, line, _, _, behind, ends = (bool(x) for x in numbers["parts"])
        return leads + (line + behind) * d + d * (d + 1) // 2 + ends
    return m
