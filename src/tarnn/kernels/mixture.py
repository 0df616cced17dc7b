"""A call that samples mixtures of logistic distributions: the record of every backend."""

from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """One value, 0 to 255, from each mixture of m distributions on [−1, 1]. Noise is contiguous."""

    parameters: Tensor  # (…, 3·m)  logits, means, logarithms of scales
    exponential: Tensor  # (…, m)  from Exp(1)
    uniform: Tensor  # (…, 1)  from U[0, 1)
    temperature: float  # > 0: divides the logits, multiplies the scales
    least: float  # log-scales are kept within these bounds
    most: float
