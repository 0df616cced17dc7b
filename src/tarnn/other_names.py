"""What other libraries call the arguments of tarnn's functions, layers and config: errors name ours."""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MASK = "key_mask (b, s), True = attend, for padding, and causal=True for the causal mask; there is no other"
_LINEAR = "feature_map=, of which linear attention is made; for softmax, take softmax_attention"
_SCALE = "nothing: linear attention has no 1/√d; multiply q by what the map wants"
FUNCTION = {  # of `linear_attention` and its kin
    "query": "q", "key": "k", "value": "v", "is_causal": "causal", "attn_mask": _MASK, "attention_mask": _MASK, "mask": _MASK,
    "key_padding_mask": "key_mask, in which True = attend: the contrary of torch's key_padding_mask",
    "enable_gqa": "nothing: k and v may have fewer heads than q", "dropout_p": "nothing: drop what comes out, as a layer does",
    "scale": _SCALE, "softmax_scale": "scale", "initial_state": "state", "output_final_state": "return_state=True",
    "head_first": "nothing: tensors are (b, h, t, d); transpose(1, 2) if yours are (b, t, h, d)",
    "g": "log_decay", "gk": "log_decay (b, g, s, f)", "g_gamma": "log_decay (g,)", "window_size": "window, of hybrid_attention",
    "is_training": "nothing", "kernel_fn": "feature_map", "nb_features":
    "feature_map=PositiveRandomFeatures(head_dim, num_features)", "attention_type": _LINEAR,
}  # fmt: skip
LAYER = {  # of `LinearAttention` and `SoftmaxAttention`
    "embed_dim": "hidden_size", "d_model": "hidden_size", "dim": "hidden_size", "nhead": "num_heads",
    "n_heads": "num_heads", "heads": "num_heads", "dim_head": "head_dim", "dim_heads": "head_dim",
    "query_dimensions": "head_dim", "value_dimensions": "head_dim", "d_keys": "head_dim", "d_values": "head_dim",
    "kdim": "context_size", "vdim": "context_size", "context_dim": "context_size", "qkv_bias": "bias",
    "attention_dropout": "dropout", "is_causal": "causal", "batch_first": "nothing: inputs are (b, t, hidden)",
    "nb_features": 'feature_map=PositiveRandomFeatures(head_dim, num_features), or feature_map="favor"',
    "generalized_attention": 'feature_map="generalized_random"', "kernel_fn": "feature_map",
    "expand_k": "head_dim", "expand_v": "head_dim", "num_kv_groups": "num_kv_heads", "mode": "nothing",
}  # fmt: skip
FORWARD = {  # of a layer's forward
    **{name: FUNCTION[name] for name in ("attn_mask", "attention_mask", "mask", "key_padding_mask")},
    "is_causal": "causal=, when the layer is made",
    "need_weights": "return_weights=True, of SoftmaxAttention",
    "past_key_values": "state",
    "length_mask": "key_mask",
    "key_lengths": "key_mask",
    "use_cache": "return_state=True",
}
CONFIG = {  # of `TarnnConfig`
    "d_model": "hidden_size", "dim": "hidden_size", "n_embd": "hidden_size", "embed_dim": "hidden_size",
    "n_layer": "num_hidden_layers", "n_layers": "num_hidden_layers", "num_layers": "num_hidden_layers",
    "depth": "num_hidden_layers", "n_head": "num_attention_heads", "n_heads": "num_attention_heads",
    "nhead": "num_attention_heads", "heads": "num_attention_heads", "num_heads": "num_attention_heads",
    "dim_head": "head_dim", "query_dimensions": "head_dim", "value_dimensions": "head_dim", "num_kv_heads": "num_key_value_heads",
    "feed_forward_dimensions": "intermediate_size", "dim_feedforward": "intermediate_size", "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size", "num_tokens": "vocab_size", "max_seq_len": "max_position_embeddings",
    "n_positions": "max_position_embeddings", "max_length": "max_position_embeddings", "attention_type": "attention",
    "attn_mode": "attention", "activation": "mlp", "hidden_act": "mlp", "rope_theta": "rotary_base",
    "nb_features": 'feature_map="favor", feature_map_options={"favor": {"num_features": …}}',
    "num_features": 'feature_map_options={"favor": {"num_features": …}}',
}  # fmt: skip

_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def ours(name: str, names: Mapping[str, str]) -> str:
    """What to write in place of another library's argument, as the end of a sentence; empty for one that nobody has."""
    return f" In its place tarnn takes {names[name]}." if name in names else ""


def names_ours(names: Mapping[str, str]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """The decorator: where a keyword is another library's, the TypeError also says what to write in its place."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                found = _UNEXPECTED.search(str(error))
                if found is None or found[1] not in names or found[1] not in kwargs:
                    raise
                message = f"{str(error).rstrip('.')}.{ours(found[1], names)}"
            raise TypeError(message)

        return call

    return decorate
