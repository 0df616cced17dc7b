"""Filters of a channel along time, as layers have them before their recurrence."""

import torch
from jaxtyping import Float
from torch import Tensor

WIDEST = 31  # of `short_convolution`


def check_filter_width(width: int) -> None:
    """Raise ValueError for a width that `short_convolution` does not have."""
    if type(width) is not int or not 1 <= width <= WIDEST:
        raise ValueError(
            f"filter_width, the width of the filters, is a whole number from 1 to {WIDEST}; got {width!r}."
        )


def initial_filters(channels: int, width: int) -> Float[Tensor, "c w"]:
    """Draw filters as a Conv1d has them; of width 1, ones."""
    if width == 1:
        return torch.ones(channels, 1, device="cpu")
    return torch.empty(channels, width, device="cpu").uniform_(-(width**-0.5), width**-0.5)
