"""Softmax attention and frozen linear layers of 16-bit models in float32, where torch is slow at 16 bits."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tarnn.kernels.cpu.wide_products import are_slow, widen_layers

NAME = "tarnn_wide_sdpa"


def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Transformers' softmax attention, multiplied in float32 and rounded to q's type."""
    o, weights = sdpa_attention_forward(module, q.float(), k.float(), v.float(), *args, **kwargs)
    return o.to(q.dtype), weights


def widen(model: nn.Module, base: Any) -> None:
    """Let a model multiply in float32 if its own type is slow here. base: the model of transformers in it.

    On an AMD EPYC with AVX2, a step of a model in bfloat16 took over ten minutes, and takes 12 seconds so.
    """
    head = base.get_output_embeddings()
    widen_layers(model, but=head)
    if are_slow(head.weight) and base.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        base.set_attn_implementation(NAME)
