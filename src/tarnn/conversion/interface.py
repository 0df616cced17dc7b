"""Linear and hybrid attention inside the models of transformers: `attn_implementation="tarnn_hybrid"`.

transformers calls an attention function by name, with queries and keys that have their positions already. Ours computes
the layers that see the whole sequence; what it can't compute exactly as the model means it is left to torch's softmax
attention (cross-attention, a model's own sliding windows) or refused by name (biases by position, attention weights).
"""

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from tarnn.conversion.layer import Heads, LayerAttention
from tarnn.conversion.options import DEFAULTS, HYBRID, KEY, LINEAR, child_of, layer_attention
from tarnn.huggingface.documents import find_documents

REFUSED = {
    "position_bias": "adds a bias that depends on positions to the products",
    "s_aux": "adds learned sinks to the softmax",
    "sinks": "adds learned sinks to the softmax",
    "alibi": "adds a bias that depends on positions to the products",
    "head_mask": "masks heads",
}


def layer_of(module: nn.Module, query: Tensor, key: Tensor) -> LayerAttention:
    """What the layer computes: what `set_options` gave it, or the defaults."""
    if (layer := child_of(module)) is not None:
        return layer
    if getattr(getattr(module, "config", None), KEY, None):
        raise ValueError(
            f"the config of this {type(module).__name__} has options of tarnn's attention that its layers were not given; "
            "call tarnn.conversion.set_options(model) after making a model from a config."
        )
    return default_layer(Heads(query.shape[1], key.shape[1], query.shape[3]), query.device)


@cache
def default_layer(heads: Heads, device: torch.device) -> LayerAttention:
    return layer_attention({}, heads, None, None).to(device)


def attention(name: str) -> Callable:
    """The attention function that transformers calls."""

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
        """query (b, h, t, d), key and value (b, g, s, ·) → (b, t, h, e), None."""
        layer = type(module).__name__
        refuse(layer, options, dropout if module.training else 0.0)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if options.get("sliding_window") is not None or crosses(module, query, key, causal):
            if options.get("softcap") is None:
                options.pop("softcap", None)
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
        own, cached = layer_of(module, query, key), getattr(key, "tarnn_cache_layer", None)
        how = DEFAULTS[name]._replace(**own.options)
        shared: dict[str, Any] = {
            "causal": causal,
            "window": how.window,
            "sinks": how.sinks,
            "slots": how.slots,
            "scale": scaling,
            "softcap": options.get("softcap"),
            "far_until": how.far_until,
        }
        bounds = documents_in(query, key, attention_mask, options, cached=cached is not None)
        if how.far_until is not None and own.feature_map is not None:
            warn_beyond(how.far_until, bounds, key.shape[2] if cached is None else cached.num_tokens)
        if bounds is not None:
            o = of_documents(own, query, key, value, bounds, **shared)
            return o.transpose(1, 2).contiguous(), None
        if attention_mask is not None and attention_mask.ndim == 2:  # a StaticCache hands places that nobody wrote, too
            key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
        shared["key_mask"] = real_tokens(layer, attention_mask, key)
        if cached is None:
            o = last_queries(own, query, key, value, **shared)
        else:
            cached.claim(module)
            one = cached.state is not None and query.shape[2] == 1 and shared["key_mask"] is None
            o, cached.state = own(
                query,
                key,
                value,
                state=cached.state,
                return_state=True,
                inplace=one and not torch.is_grad_enabled(),
                **shared,
            )
        return o.transpose(1, 2).contiguous(), None

    return run


def warn_beyond(far_until: int, bounds: Tensor | None, length: int) -> None:
    """A warning, once, that a sequence is longer than what the features were calibrated on."""
    if (length if bounds is None else int(bounds.diff().amax())) > far_until:
        warnings.warn(
            f"this model's features were calibrated on up to {far_until:,} tokens; beyond that it sees its window and "
            "sinks alone. Convert it on longer texts (`tarnn convert --length`) to use them there.",
            stacklevel=3,
        )


def refuse(layer: str, options: dict[str, Any], dropout: float) -> None:
    """ValueError for what a model asks for and we would ignore."""
    for name, what in REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(
                f"{layer} {what} ({name}), which tarnn's attention does not have; load the model with "
                'attn_implementation="sdpa" or "eager".'
            )
    if options.get("output_attentions"):
        raise ValueError(
            f"tarnn's attention never forms its attention matrix, and {layer} was asked for it "
            '(output_attentions); load the model with attn_implementation="eager" for that.'
        )
    if dropout:
        raise ValueError(
            f"{layer} drops attention weights in training (attention_dropout = {dropout}), which tarnn's attention "
            "never forms; set that to 0 in the config."
        )


def crosses(module: nn.Module, query: Tensor, key: Tensor, causal: bool) -> bool:
    """Whether keys come from another sequence: such layers stay as they are."""
    if getattr(module, "is_cross_attention", False) or (getattr(module, "is_decoder", False) and not causal):
        return True
    return not causal and query.shape[2] != key.shape[2]


def real_tokens(layer: str, mask: Tensor | None, key: Tensor) -> Tensor | None:
    """Which keys are real, (b, s); None for all."""
    if mask is None:
        return None
    if mask.ndim != 2:
        raise ValueError(
            f"{layer} has a mask of shape {tuple(mask.shape)}; tarnn's attention takes (batch, keys), which says where "
            'there is padding. For other masks load the model with attn_implementation="sdpa".'
        )
    real = mask[:, -key.shape[2] :].bool()
    return None if real.all() else real


def documents_in(
    query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any], *, cached: bool
) -> Tensor | None:
    """Bounds of documents that are packed into the rows, as transformers says so; None for whole rows.

    Places of padding don't go on by one either, but padding has a mask (b, s).
    """
    positions, padding = options.get("position_ids"), mask is not None and mask.ndim == 2
    if query.shape[2] != key.shape[2] or padding or (positions is not None and positions.ndim != 2):
        return None
    shape = query.shape[0], query.shape[2]
    return find_documents(shape, options, position_ids=positions, use_cache=cached).bounds


def of_documents(
    layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, **options: Any
) -> Tensor:
    """Attention of rows in which documents are packed: all rows end to end."""
    b = query.shape[0]
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    o, _ = layer(q, k, v, cu_seqlens=bounds, **options)  # (1, h, b·t, e)
    return o[0].unflatten(1, (b, -1)).transpose(0, 1)


def last_queries(layer: LayerAttention, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Attention of the last t of s tokens: a growing cache hands all keys, and the queries of the new ones."""
    missing = key.shape[2] - query.shape[2]
    q = torch.nn.functional.pad(query, (0, 0, missing, 0)) if missing else query
    return layer(q, key, value, **options)[0][:, :, missing:]


def as_sdpa_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A padding mask (b, s) as torch's attention takes it."""
    if mask is None or mask.ndim != 2:
        return mask
    return mask[:, None, None, :].expand(-1, -1, query.shape[2], -1)


def padding_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask of a model, O(t): (b, s), or None where nothing is masked. With a StaticCache s counts the places that are
    written. A layer whose pattern is its own (a sliding window, chunks) gets the mask of torch's attention, since it is
    computed by that."""
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **options,
        )
    static = isinstance(q_offset, Tensor)  # once it holds something
    if not static:
        static = kv_length > (q_offset + q_length if attention_mask is None else attention_mask.shape[1])
    if static and mask_function is causal_mask_function:
        return written(batch_size, kv_length, q_offset, q_length, attention_mask, options.get("device"))
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    return None if mask.all() else mask


def written(b: int, room: int, past: Any, new: int, mask: Tensor | None, device: torch.device | None) -> Tensor | None:
    """The mask (b, past + new) of a StaticCache's places that are written, the new ones included; None: all of them are.

    Raises ValueError for a mask that is too short, and where a compiler traces, since `past` is then not known.
    """
    if is_tracing(past):
        raise ValueError(
            "tarnn's attention can't be compiled with a StaticCache, whose length is data; generate with "
            "constant_cache(model), or without torch.compile."
        )
    seen = int(past) + new
    if mask is None:
        return None if seen == room else torch.ones(b, seen, dtype=torch.bool, device=device)
    if mask.shape[1] < seen:
        raise ValueError(
            f"attention_mask has a column for each of {seen} tokens, those in the cache first; expected {seen} columns, "
            f"got {mask.shape[1]}."
        )
    return mask[:, :seen].bool()


def register() -> None:
    """Makes both names known to transformers."""
    for name in (LINEAR, HYBRID):
        AttentionInterface.register(name, attention(name))
        AttentionMaskInterface.register(name, padding_mask)
