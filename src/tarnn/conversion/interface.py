"""Linear and hybrid attention inside the models of transformers: `attn_implementation="tarnn_hybrid"`.

transformers calls an attention function by name, with queries and keys that have their positions already. Ours computes
the layers that attend to the whole sequence. What it can't compute exactly as the model means it is left to torch's softmax
attention (cross-attention, a model's own sliding windows) or refused by name (biases by position, attention weights).

transformers hands nothing else through, so five things pass it on the side; an upgrade may break them:

* `config.tarnn_attention`: the options of all layers (`options.py`);
* `module.tarnn`: a layer's `LayerAttention`, a child of the attention module, with its parameters (`options.py`);
* `quantization_config`: makes `from_pretrained` add these children before it reads weights (`hf_quantizer_hook.py`);
* `key.tarnn_cache_layer`: the cache layer, on the keys that its `update` returns (`cache.py`);
* `module.tarnn_callback`: what `capturing` calls with the inputs of a layer, while it lasts (`capture.py`).
"""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from tarnn.conversion.cache import HybridCacheLayer
from tarnn.conversion.layer import Heads, LayerAttention
from tarnn.conversion.options import DEFAULTS, HYBRID, KEY, LINEAR, AttentionOptions, child_of, layer_attention
from tarnn.huggingface.documents import find_documents
from tarnn.huggingface.rewind import read_and_note

REFUSED = {
    "position_bias": "adds a bias that depends on positions to the products",
    "s_aux": "adds learned sinks to the softmax",
    "sinks": "adds learned sinks to the softmax",
    "alibi": "adds a bias that depends on positions to the products",
    "head_mask": "masks heads",
}


class Call(NamedTuple):
    """One call of an attention function, as transformers makes it."""

    module: nn.Module
    q: Tensor  # (b, h, t, d), positions applied
    k: Tensor  # (b, g, s, d)
    v: Tensor  # (b, g, s, e)
    mask: Tensor | None
    causal: bool
    scale: float | None
    dropout: float
    options: dict[str, Any]

    @property
    def layer(self) -> str:
        return type(self.module).__name__

    @property
    def stays_softmax(self) -> bool:
        """Whether the layer has a sliding window of its own, or keys of another sequence."""
        if self.options.get("sliding_window") is not None or getattr(self.module, "is_cross_attention", False):
            return True
        if self.causal:
            return False
        return getattr(self.module, "is_decoder", False) or self.q.shape[2] != self.k.shape[2]


def attention_function(compute: Callable[[Call], Tensor | None]) -> Callable[..., tuple[Tensor, None]]:
    """An attention function for transformers: `compute`'s output (b, h, t, e), or softmax attention where that is None."""

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
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        rate = dropout if module.training else 0.0
        o = compute(Call(module, query, key, value, attention_mask, causal, scaling, rate, options))
        if o is not None:
            return o.to(query.dtype).transpose(1, 2).contiguous(), None  # states may have more digits
        if options.get("softcap") is None:
            options.pop("softcap", None)
        mask = attention_mask
        if mask is not None and mask.ndim == 2:  # padding (b, s), as torch's attention takes it
            mask = mask[:, None, None, :].expand(-1, -1, query.shape[2], -1)
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
        )

    return run


def hybrid(defaults: AttentionOptions, call: Call) -> Tensor | None:
    """The layer's own attention; None where it stays softmax attention."""
    refuse(call)
    if call.stays_softmax:
        return None
    own = layer_of(call)
    cached: HybridCacheLayer | None = getattr(call.k, "tarnn_cache_layer", None)
    options = defaults._replace(**own.options)
    shared: dict[str, Any] = {"causal": call.causal, "scale": call.scale, "softcap": call.options.get("softcap")}
    shared |= {name: getattr(options, name) for name in ("window", "sinks", "slots", "far_until")}
    bounds = documents_in(call, cached=cached is not None)
    if options.far_until is not None and own.feature_map is not None:
        warn_beyond(options.far_until, bounds, call.k.shape[2] if cached is None else cached.num_tokens)
    if bounds is not None:
        return of_documents(own, call, bounds, **shared)
    shared["key_mask"] = real_tokens(call)
    if cached is None:
        return last_queries(own, call, **shared)
    cached.claim(call.module)
    one_token = cached.state is not None and call.q.shape[2] == 1 and shared["key_mask"] is None
    inplace = one_token and not torch.is_grad_enabled() and not cached.record_past

    def run(inputs: tuple[Tensor, ...], state: Any) -> Any:
        q, k, v, *mask = inputs
        options = shared | {"key_mask": mask[0][:, 0] if mask else None}
        return own(q, k, v, state=state, return_state=True, inplace=inplace, **options)

    mask = () if shared["key_mask"] is None else (shared["key_mask"][:, None],)  # with time where the others have it
    inputs = (call.q, call.k, call.v, *mask)
    if cached.record_past:
        o, cached.state = read_and_note(run, inputs, cached.state, cached.note)
    else:
        o, cached.state = run(inputs, cached.state)
    return o


def layer_of(call: Call) -> LayerAttention:
    """Return the layer's options as `set_options` set them, or the defaults."""
    if (layer := child_of(call.module)) is not None:
        return layer
    if getattr(getattr(call.module, "config", None), KEY, None):
        raise ValueError(
            f"the config of this {call.layer} has options of tarnn's attention that its layers were not given; "
            "call tarnn.conversion.set_options(model) after making a model from a config."
        )
    return default_layer(Heads(call.q.shape[1], call.k.shape[1], call.q.shape[3]), call.q.device)


@cache
def default_layer(heads: Heads, device: torch.device) -> LayerAttention:
    return layer_attention({}, heads, None, None).to(device)


def warn_beyond(far_until: int, bounds: Tensor | None, length: int) -> None:
    """A warning, once, that a sequence is longer than what the features were calibrated on."""
    if (length if bounds is None else int(bounds.diff().amax())) > far_until:
        warnings.warn(
            f"this model's features were calibrated on up to {far_until:,} tokens; beyond that it sees its window and "
            "sinks alone. Convert it on longer texts (`tarnn convert --length`) to use them there.",
            stacklevel=3,
        )


def refuse(call: Call) -> None:
    """Raise ValueError for what the model requests and we would ignore."""
    for name, what in REFUSED.items():
        if call.options.get(name) is not None:
            raise ValueError(
                f"{call.layer} {what} ({name}), which tarnn's attention does not have; load the model with "
                'attn_implementation="sdpa" or "eager".'
            )
    if call.options.get("output_attentions"):
        raise ValueError(
            f"tarnn's attention never forms its attention matrix, and {call.layer} was asked for it "
            '(output_attentions); load the model with attn_implementation="eager" for that.'
        )
    if call.dropout:
        raise ValueError(
            f"{call.layer} drops attention weights in training (attention_dropout = {call.dropout}), which tarnn's "
            "attention never forms; set that to 0 in the config."
        )


def real_tokens(call: Call) -> Tensor | None:
    """Which keys are no padding, (b, s); None for all."""
    if call.mask is None:
        return None
    if call.mask.ndim != 2:
        raise ValueError(
            f"{call.layer} has a mask of shape {tuple(call.mask.shape)}; tarnn's attention takes (batch, keys), which says "
            'where there is padding. For other masks load the model with attn_implementation="sdpa".'
        )
    real = call.mask[:, -call.k.shape[2] :].bool()
    return None if real.all() else real


def documents_in(call: Call, *, cached: bool) -> Tensor | None:
    """Bounds of the documents that are packed into the rows; None for whole rows.

    Positions of padding don't increase by one either, but padding has a mask (b, s).
    """
    positions, padded = call.options.get("position_ids"), call.mask is not None and call.mask.ndim == 2
    if call.q.shape[2] != call.k.shape[2] or padded or (positions is not None and positions.ndim != 2):
        return None
    shape = call.q.shape[0], call.q.shape[2]
    return find_documents(shape, call.options, position_ids=positions, use_cache=cached).bounds


def of_documents(layer: LayerAttention, call: Call, bounds: Tensor, **options: Any) -> Tensor:
    """Attention of rows in which documents are packed: all rows end to end."""
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (call.q, call.k, call.v))
    o, _ = layer(q, k, v, cu_seqlens=bounds, **options)  # (1, h, b·t, e)
    return o[0].unflatten(1, (len(call.q), -1)).transpose(0, 1)


def last_queries(layer: LayerAttention, call: Call, **options: Any) -> Tensor:
    """Attention of the last t of s tokens: a growing cache hands over all keys, and the queries of the new ones."""
    missing = call.k.shape[2] - call.q.shape[2]
    q = torch.nn.functional.pad(call.q, (0, 0, missing, 0)) if missing else call.q
    return layer(q, call.k, call.v, **options)[0][:, :, missing:]


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
    """The mask of a model, O(t): (b, s), or None where nothing is masked.

    A layer whose pattern is its own (a sliding window, chunks) gets the mask of torch's attention, since it is computed by
    that. Raises ValueError for a StaticCache, which also hands over positions that nobody wrote.
    """
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
        raise ValueError(
            "there are more keys than tokens so far: a StaticCache, which has empty places, or an attention_mask that lacks the "
            "columns of tokens in the cache. Generate with constant_cache(model), or with the default cache."
        )
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:].bool()
    return None if mask.all() else mask


def register() -> None:
    """Make both names known to transformers."""
    for name in (LINEAR, HYBRID):
        AttentionInterface.register(name, attention_function(partial(hybrid, DEFAULTS[name])))
        AttentionMaskInterface.register(name, padding_mask)
