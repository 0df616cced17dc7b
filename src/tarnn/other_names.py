"""What other libraries call the arguments of tarnn's functions, layers and config: errors name ours.

The tables read ours: theirs, with spaces between them.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_MASKS = {  # of functions and layers alike
    "key_mask (b, s), True = attend, for padding, and causal=True for the causal mask; there is no other": (
        "attn_mask attention_mask mask"
    ),
    "key_mask, in which True = attend: the contrary of torch's key_padding_mask": "key_padding_mask",
}
FUNCTION = {  # of `linear_attention` and its kin
    **_MASKS,
    "q": "query",
    "k": "key",
    "v": "value",
    "causal": "is_causal",
    "scale": "softmax_scale",
    "state": "initial_state",
    "return_state=True": "output_final_state",
    "log_decay": "g",
    "log_decay (b, g, s, f)": "gk",
    "log_decay (g,)": "g_gamma",
    "window, of hybrid_attention": "window_size",
    "feature_map": "kernel_fn",
    "feature_map=PositiveRandomFeatures(head_dim, num_features)": "nb_features",
    "feature_map=, of which linear attention is made; for softmax, take softmax_attention": "attention_type",
    "nothing": "is_training",
    "nothing: k and v may have fewer heads than q": "enable_gqa",
    "nothing: drop what comes out, as a layer does": "dropout_p",
    "nothing: linear attention has no 1/√d; multiply q by what the map wants": "scale",
    "nothing: tensors are (b, h, t, d); transpose(1, 2) if yours are (b, t, h, d)": "head_first",
}
SCAN = {  # of `diagonal_scan`, `selective_scan` and their steps
    **_MASKS,
    "x": "u hidden_states",
    "dt": "delta",
    "log_decay": "g gk recurrent_gate",
    "dt=softplus(delta + delta_bias)": "delta_bias dt_bias delta_softplus dt_softplus",
    "nothing: multiply the result by silu(z)": "z",
    "state": "initial_state ssm_states recurrent_states h0",
    "return_state=True": "return_last_state output_final_state",
}
DELTA = {  # of `delta_rule` and its kin
    "q": "query",
    "k": "key",
    "v": "value",
    "log_decay": "g",
    "log_decay (b, n, t, d)": "gk",
    "normalize_qk": "use_qk_l2norm_in_kernel",
    "key_mask (b, t), True = there": "attn_mask attention_mask mask",
    "key_mask, in which True = there: the contrary of torch's key_padding_mask": "key_padding_mask",
    "state=DeltaState(S)": "initial_state",
    "return_state=True": "output_final_state",
    "nothing: tensors are (b, h, t, d); transpose(1, 2) if yours are (b, t, h, d)": "head_first",
    "nothing: chunks are chosen by the kernels": "chunk_size",
}
LAYER = {  # of `LinearAttention` and `SoftmaxAttention`
    "hidden_size": "embed_dim d_model dim",
    "num_heads": "nhead n_heads heads",
    "num_kv_heads": "num_kv_groups",
    "head_dim": "dim_head dim_heads query_dimensions value_dimensions d_keys d_values expand_k expand_v",
    "context_size": "kdim vdim context_dim",
    "bias": "qkv_bias",
    "dropout": "attention_dropout",
    "causal": "is_causal",
    "feature_map": "kernel_fn",
    'feature_map=PositiveRandomFeatures(head_dim, num_features), or feature_map="favor"': "nb_features",
    'feature_map="generalized_random"': "generalized_attention",
    "nothing": "mode",
    "nothing: inputs are (b, t, hidden)": "batch_first",
}
FORWARD = {  # of a layer's forward
    **_MASKS,
    "key_mask": "length_mask key_lengths",
    "causal=, when the layer is made": "is_causal",
    "return_weights=True, of SoftmaxAttention": "need_weights",
    "state": "cache past_key_values",
    "return_state=True": "use_cache",
}
CONFIG = {  # of `TarnnConfig`
    "hidden_size": "d_model dim n_embd embed_dim",
    "num_hidden_layers": "n_layer n_layers num_layers depth",
    "num_attention_heads": "n_head n_heads nhead heads num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "dim_head query_dimensions value_dimensions",
    "intermediate_size": "feed_forward_dimensions dim_feedforward n_inner ffn_dim",
    "vocab_size": "num_tokens",
    "max_position_embeddings": "max_seq_len n_positions max_length",
    "attention": "attention_type attn_mode",
    "mlp": "activation hidden_act",
    "rotary_base": "rope_theta",
    'feature_map="favor", feature_map_options={"favor": {"num_features": …}}': "nb_features",
    'feature_map_options={"favor": {"num_features": …}}': "num_features",
}


def our_name(name: str, names: Mapping[str, str]) -> str:
    """Find what to write in place of another library's name; "" for a name that none of them has."""
    return next((ours for ours, theirs in names.items() if name in theirs.split()), "")


def names_ours(names: Mapping[str, str]) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make a decorator: where an argument has another library's name, the TypeError says what to write instead."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                return function(*args, **kwargs)
            except TypeError:
                known = inspect.signature(function).parameters
                instead = {name: our_name(name, names) for name in kwargs if name not in known}
                refused = next((name for name, ours in instead.items() if ours), "")
                if not refused:
                    raise
            message = (
                f"{function.__qualname__}() has no argument {refused!r}. In its place tarnn takes {instead[refused]}."
            )
            raise TypeError(message)

        return call

    return decorate
