"""A function's passes as calls that a clock can repeat."""

from collections.abc import Callable
from typing import Any

import torch


def forward(function: Callable, inputs: tuple) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return function(*inputs)

    return call


def both(function: Callable, inputs: tuple) -> Callable[[], object]:
    """Forward and backward, of inputs whose layouts stay as they are."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    sent = torch.randn_like(forward(function, inputs)())
    return lambda: torch.autograd.grad(function(*leaves), leaves, sent)
