"""Looking at the attention of a pretrained model while it runs: queries, keys and values of each layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tarnn.conversion.interface import as_sdpa_mask, crosses, padding_mask, real_tokens, refuse
from tarnn.conversion.options import attention_layers

WATCHED = "tarnn_watched"


class Seen(NamedTuple):
    """One call of a layer's attention."""

    q: Tensor  # (b, h, t, d), positions applied
    k: Tensor  # (b, g, t, d)
    v: Tensor  # (b, g, t, e)
    causal: bool
    scale: float
    key_mask: Tensor | None  # (b, t)


Look = Callable[[int, Seen], Tensor | None]


def run(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """torch's softmax attention; a layer that the hybrid would compute is looked at first."""
    layer, look = type(module).__name__, getattr(module, "tarnn_look", None)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    softcap = options.pop("softcap", None)
    if softcap is not None:
        raise ValueError(
            f"{layer} caps its logits at {softcap} (attn_logit_softcapping), which torch's softmax attention, the measure of a "
            "conversion, does not; such a model can't be converted."
        )
    if look is not None and options.get("sliding_window") is None and not crosses(module, query, key, causal):
        refuse(layer, options, dropout if module.training else 0.0)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        o = look(Seen(query, key, value, causal, scale, real_tokens(layer, attention_mask, key)))
        if o is not None:
            return o.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module,
        query,
        key,
        value,
        as_sdpa_mask(attention_mask, query),
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **options,
    )


@contextmanager
def watching(model: Any, look: Look) -> Iterator[None]:
    """While it lasts the model runs its softmax attention, and look(layer, seen) is called for each layer.

    layer: its number in `attention_layers(model)`. What look returns, (b, h, t, e), takes the place of the layer's
    output; None leaves it. Layers that the hybrid leaves alone (cross-attention, sliding windows) are not looked at.

    Raises ValueError for a model that calls no attention function of transformers.
    """
    if not model._can_set_attn_implementation():
        raise ValueError(
            f"{type(model).__name__} has no attention interface: its attention is written into the model (as where "
            "positions are ALiBi's), so it can't be converted. Take a model that runs attn_implementation=\"sdpa\"."
        )
    AttentionInterface.register(WATCHED, run)
    AttentionMaskInterface.register(WATCHED, padding_mask)
    before, layers = model.config._attn_implementation, attention_layers(model)
    model.set_attn_implementation(WATCHED)
    try:
        for i, module in enumerate(layers):
            module.tarnn_look = lambda seen, i=i: look(i, seen)  # type: ignore[assignment]
        yield
    finally:
        for module in layers:
            del module.tarnn_look
        model.set_attn_implementation(before)
