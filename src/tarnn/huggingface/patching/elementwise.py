"""Compute norms, with a gate or without, and SwiGLU of transformers' layers, each as one node of autograd."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from tarnn.numerics import wide
from tarnn.ops.elementwise import rms_norm, swiglu


def norm_layer(original: Callable, centered: bool = False) -> Callable:
    """The forward of a norm; centered: its weight is added to 1."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Tensor, *gate: Tensor) -> Tensor:
        plain = not gate or (self.activation == "silu" and gate[0].dtype == hidden_states.dtype)
        if not (plain and _ours(hidden_states) and (centered or self.weight.dtype == hidden_states.dtype)):
            return original(self, hidden_states, *gate)
        weight = 1.0 + self.weight.to(wide(self.weight.dtype)) if centered else self.weight
        return rms_norm(hidden_states, weight, self.eps if centered else self.variance_epsilon, *gate)

    return forward


centered_norm_layer = functools.partial(norm_layer, centered=True)


def mlp_layer(gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Callable[[Callable], Callable]:
    """The forward of a SwiGLU whose linear layers have these names."""

    def replace(original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(self: Any, x: Tensor) -> Tensor:
            if not _ours(x) or type(getattr(self, "act_fn", _SILU)) not in (nn.SiLU, type(_SILU)):
                return original(self, x)
            return getattr(self, down)(swiglu(getattr(self, gate)(x), getattr(self, up)(x)))

        return forward

    return replace


_SILU = ACT2FN["silu"]  # what a layer computes that names no activation


def _ours(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()
