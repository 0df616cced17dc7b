"""RecurrentGemma's recurrent block: a short convolution and the RG-LRU, whose states stand on the layer.

transformers' block starts its convolution anew with every call of several tokens, and sees padding.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from tarnn.huggingface.patching.packed import bounds_of, end_to_end, model_with_packed_rows
from tarnn.ops.convolution.op import short_convolution
from tarnn.ops.scan.op import diagonal_scan
from tarnn.ops.states import ConvolutionState, ScanState

_REAL = "real_tokens"


def griffin_model(original: Callable) -> Callable:
    """The forward of the text model, which also tells its layers where there is padding."""
    inner = model_with_packed_rows(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            kwargs[_REAL] = attention_mask.bool()
        return inner(self, *args, attention_mask=attention_mask, **kwargs)

    return forward


def griffin_block(original: Callable) -> Callable:
    """The forward of a block on a CPU: (b, t, c) → (b, t, c). Texts begin where positions are 0."""

    @functools.wraps(original)
    def forward(
        self: Any,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Any,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if input_states.device.type != "cpu":
            return original(self, input_states, position_ids, attention_mask, use_cache, **kwargs)
        b, t, _ = input_states.shape
        positions, real = position_ids.expand(b, t), kwargs.get(_REAL)
        real = None if real is None else real[:, -t:]
        x, bounds = self.linear_x(input_states), bounds_of(kwargs)
        tokens, h = _states(self, x, _begins(positions, real)) if use_cache and bounds is None else (None, None)
        if bounds is not None:
            x, positions = end_to_end(x), end_to_end(positions)
        x, last = short_convolution(
            x,
            self.conv_1d.weight[:, 0],
            self.conv_1d.bias,
            key_mask=real,
            cu_seqlens=bounds,
            state=None if tokens is None else ConvolutionState(tokens),
            return_state=True,
        )
        gated, log_decay = _gates(self.rg_lru, x, positions == 0)
        past = None if h is None else ScanState(h)
        y, after = diagonal_scan(gated, log_decay, key_mask=real, cu_seqlens=bounds, state=past, return_state=True)
        self.conv1d_state = last.tokens.detach().transpose(1, 2) if use_cache else None
        self.rg_lru.recurrent_states = after.h.detach() if use_cache else None
        return self.linear_out(y.reshape(b, t, -1) * self.act_fn(self.linear_y(input_states))), None

    return forward


def _begins(positions: Tensor, real: Tensor | None) -> Tensor:
    """Which rows begin a text (b,): the first token, or the first real one, has position 0."""
    first = positions[:, 0] == 0
    if real is None:
        return first
    return first | (positions.gather(1, real.int().argmax(1, keepdim=True))[:, 0] == 0)


def _states(block: Any, x: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
    """The last inputs of the convolution (b, w − 1, c) and the state (b, c) that the layer holds; zeros where a text begins."""
    (b, _, c), width = x.shape, block.conv1d_width
    tokens, h = block.conv1d_state, block.rg_lru.recurrent_states
    if tokens is None or h is None or len(tokens) != b:
        return x.new_zeros(b, width - 1, c), x.new_zeros(b, c, dtype=torch.float32)
    tokens = tokens.to(x.dtype).transpose(1, 2).masked_fill(begins[:, None, None], 0)
    return tokens, h.float().masked_fill(begins[:, None], 0)


def _gates(lru: Any, x: Tensor, reset: Tensor) -> tuple[Tensor, Tensor]:
    """Return the recurrence's input and its log-decay, both (b, t, c). reset (b, t): True where a text begins."""
    square_root = sys.modules[type(lru).__module__].SqrtBoundDerivative.apply  # whose gradient stays finite
    b, t, c = x.shape
    heads = x.reshape(b * t, lru.num_attention_heads, lru.block_width).transpose(0, 1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias[:, None], heads, weight).transpose(0, 1).reshape(b, t, c).sigmoid()

    log_decay = -8.0 * gate(lru.recurrent_gate_weight, lru.recurrent_gate_bias) * softplus(lru.recurrent_param)
    scale = torch.where(reset[:, :, None], 1, square_root(1 - torch.exp(2 * log_decay)))
    gated = x * gate(lru.input_gate_weight, lru.input_gate_bias) * scale.to(x.dtype)
    return gated, log_decay.masked_fill(reset[:, :, None], -torch.inf)
