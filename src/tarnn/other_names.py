"""Arguments of other libraries by the names of tarnn's layers and config, for errors about unknown arguments.

The tables read ours: theirs, with spaces between them. docs/migration.md has a table for each library.
"""

from collections.abc import Mapping

FORWARD = {  # of a layer's forward
    "key_mask (b, s), True = attend, for padding, and causal=True for the causal mask; there is no other": (
        "attn_mask attention_mask mask"
    ),
    "key_mask, in which True = attend: the contrary of torch's key_padding_mask": "key_padding_mask",
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
