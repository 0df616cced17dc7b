"""Functions that flash-linear-attention's layers call around its recurrences, in plain PyTorch on a CPU.

Each function has the arguments of the one that it replaces.
"""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tarnn.attention.token_shift import token_shift as shifted
from tarnn.numerics import widen
from tarnn.ops.convolution.op import short_convolution
from tarnn.ops.states import ConvolutionState


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """Norm the last axis, group by group, of x or of x + residual; with prenorm return the sum, too."""
    total = widen(x) if residual is None else widen(x) + widen(residual)
    groups = total.unflatten(-1, (num_groups, -1))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    y = y if weight is None else y * weight
    y = (y if bias is None else y + bias).to(x.dtype)
    if not prenorm:
        return y
    alone = torch.float32 if residual_in_fp32 else x.dtype
    return y, total.to(alone if residual is None else residual.dtype)


def group_norm_linear(
    x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, prenorm=False,
    residual_in_fp32=False, is_rms_norm=False, num_groups=1,
):  # fmt: skip
    """Norm and multiply by a matrix."""
    normed = group_norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)
    y, *total = normed if prenorm else (normed,)
    y = F.linear(y, linear_weight, linear_bias)
    return (y, *total) if prenorm else y


def layer_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6,
    is_rms_norm=False,
):  # fmt: skip
    """Norm and multiply by the activation of the gate."""
    normed = group_norm(widen(x), weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)
    y, *total = normed if prenorm else (normed,)
    gate = widen(g)
    y = (y * (torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate))).to(x.dtype)
    return (y, *total) if prenorm else y


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    wide = widen(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(output_dtype or x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    return F.logsigmoid(x) / temperature


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    *_: Any,
    cp_context: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """x (b, t, c), weight (c, w); states (n, c, w) hold the last w inputs, of which a filter reads w − 1."""
    if cp_context is not None:
        raise ValueError("tarnn computes flash-linear-attention's convolution on a CPU without cp_context=; got one.")
    shape, width = x.shape, weight.shape[1]
    x = x.flatten(2)
    # a width of w + 1, the oldest weight zero, has a state of w inputs
    wider = F.pad(weight, (1, 0))
    state = None if initial_state is None else ConvolutionState(initial_state[:, :, -width:].mT.to(x.dtype))
    y, after = short_convolution(
        x, wider, bias, activation="silu" if activation in ("silu", "swish") else None, cu_seqlens=cu_seqlens,
        state=state, return_state=True,
    )  # fmt: skip
    y = y.view(shape)
    y = y if residual is None else y + residual
    return y, after.tokens.mT.contiguous() if output_final_state else None


def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None) -> tuple[Tensor, Tensor]:
    """One token per sequence, x (n, c), (n, 1, c) or (1, n, c), written into the cache (n, c, w)."""
    tokens = x.reshape(cache.shape[0], 1, -1)
    y, after = causal_conv1d(tokens, weight, bias, None, cache, True, activation)
    cache.copy_(after)
    y = y.reshape(x.shape)
    return (y if residual is None else y + residual), cache


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Any = None,
) -> Any:
    """Return the token before, less the token itself; the cache (n, c) or (n, 1, c) holds each sequence's last token."""
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    last = x.new_zeros(sequences, x.shape[2]) if cache is None else cache.reshape(sequences, -1)
    before, last = shifted(x, last, None, cu_seqlens)
    return (before - x, last) if output_cache else before - x


def mixtures_of_rwkv7(hidden_states, delta, xr, xw, xk, xv, xa, xg=None) -> tuple:
    """Return hidden + delta ⊙ x for each of six x, None for a gate that is not there."""
    mixes = (xr, xw, xk, xv, xa, xg)
    return tuple(None if x is None else torch.addcmul(hidden_states, delta, x) for x in mixes)


def keys_of_rwkv7(k: Tensor, a: Tensor, ka: Tensor, cu_seqlens=None, cu_seqlens_cpu=None) -> Tensor:
    return k.addcmul(k * (a - 1), ka)


def output_of_rwkv7(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Add the bonus of the current token, and multiply by the gate."""
    return (o + ((r * k * r_k).sum(-1, keepdim=True) * v).view(o.shape)) * g


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Any = None,
) -> Tensor:
    """Rotate x (b, t, h, d) by the angles of its positions, which count from an offset per sequence; by fla's reference."""
    position = torch.arange(x.shape[1], device=x.device)[None]
    offset = seqlen_offsets
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens.to(torch.int64), position[0], right=True) - 1
        position = position - cu_seqlens[sequence]
        offset = offset[sequence] if isinstance(offset, Tensor) else offset
    elif isinstance(offset, Tensor):
        offset = offset[:, None]
    position = position + offset
    reference = sys.modules["fla.modules.rotary.ops"].rotary_embedding_ref
    y = reference(x, cos[position], sin[position], interleaved).to(x.dtype)
    return x.copy_(y) if inplace else y


def inputs_for_generation(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Prepare a step of `generate` with the cache by its old name: fla's models ignore the new one."""
    from transformers import GenerationMixin

    from tarnn.huggingface.versions import CACHE, OLD_NAMES, for_generate

    inputs = GenerationMixin.prepare_inputs_for_generation(model, *args, **for_generate(kwargs))
    return {OLD_NAMES[0] if name == CACHE else name: x for name, x in inputs.items()}
