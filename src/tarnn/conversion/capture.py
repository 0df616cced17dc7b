"""Capture the inputs of each attention layer of a pretrained model while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tarnn.conversion.interface import Call, attention_function, padding_mask, real_tokens, refuse
from tarnn.conversion.options import attention_layers

CAPTURED = "tarnn_captured"


class AttentionInputs(NamedTuple):
    """The inputs of one call of a layer's attention."""

    q: Tensor  # (b, h, t, d), positions applied
    k: Tensor  # (b, g, t, d)
    v: Tensor  # (b, g, t, e)
    causal: bool
    scale: float
    key_mask: Tensor | None  # (b, t)


Callback = Callable[[int, AttentionInputs], Tensor | None]


def keep_softmax(layer: int, inputs: AttentionInputs) -> None:
    """The callback that changes nothing."""


def captured(call: Call) -> Tensor | None:
    """The callback's output for a layer that the hybrid would compute; None leaves it to softmax attention."""
    callback = getattr(call.module, "tarnn_callback", None)
    if (softcap := call.options.get("softcap")) is not None:
        raise ValueError(
            f"{call.layer} caps its logits at {softcap} (attn_logit_softcapping), which torch's softmax attention, the "
            "measure of a conversion, does not; such a model can't be converted."
        )
    if callback is None or call.stays_softmax:
        return None
    refuse(call)
    scale = call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    return callback(AttentionInputs(call.q, call.k, call.v, call.causal, scale, real_tokens(call)))


AttentionInterface.register(CAPTURED, attention_function(captured))
AttentionMaskInterface.register(CAPTURED, padding_mask)


@contextmanager
def capturing(model: PreTrainedModel, callback: Callback) -> Iterator[None]:
    """While it lasts, the model runs its softmax attention, and calls callback(layer, inputs) for each layer.

    layer: its number in `attention_layers(model)`. A tensor (b, h, t, e) that the callback returns replaces the layer's
    output. Layers that the hybrid leaves alone (cross-attention, sliding windows) are not captured.

    Raises ValueError for a model that calls no attention function of transformers.
    """
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} has no attention interface: its attention is written into the model (as where "
            "positions are ALiBi's), so it can't be converted. Take a model that runs attn_implementation=\"sdpa\"."
        )
    before, layers = model.config._attn_implementation, attention_layers(model)
    model.set_attn_implementation(CAPTURED)
    try:
        for i, module in enumerate(layers):
            module.tarnn_callback = lambda inputs, i=i: callback(i, inputs)  # type: ignore[assignment]
        yield
    finally:
        for module in layers:
            del module.tarnn_callback
        model.set_attn_implementation(before)
