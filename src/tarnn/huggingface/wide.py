"""Softmax attention and frozen linear layers of models that are tuned: in float32, where torch is slow at 16 bits.

Sequences that share a row attend one at a time. Transformers masks the products between them; here they are not made.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tarnn.huggingface.head_loss import JOINS
from tarnn.huggingface.patching.packed import bounds_of
from tarnn.kernels.cpu.wide_products import are_slow, widen_layers

NAME = "tarnn_sdpa"


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Return transformers' softmax attention (b, t, h, d) of q, k, v (b, h, t, d), in q's type.

    attention_mask: (…, t, t); it still holds within a sequence.
    """
    dtype, bounds = q.dtype, bounds_of(options)
    if are_slow(q):
        q, k, v = q.float(), k.float(), v.float()
    cuts = [(0, None)] if bounds is None or len(q) > 1 else pairwise(bounds.tolist())
    parts = []
    for i, j in cuts:
        mask = attention_mask if attention_mask is None else attention_mask[..., i:j, i:j]
        parts.append(sdpa_attention_forward(module, q[:, :, i:j], k[:, :, i:j], v[:, :, i:j], mask, **options)[0])
    return torch.cat(parts, 1).to(dtype), None


def widen(model: nn.Module, base: Any) -> None:
    """Let a model multiply in float32 if its own type is slow here, and packed sequences attend one at a time.

    base: the model of transformers in it. With AVX2, a step in bfloat16 took over ten minutes, and takes 12 seconds so.
    """
    # a head that is one with the loss is widened there
    widen_layers(model, but=base.get_output_embeddings() if hasattr(base.forward, JOINS) else None)
    if base.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        base.set_attn_implementation(NAME)
