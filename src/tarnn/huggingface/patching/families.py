"""The families of transformers whose linear layers tarnn computes, and what is replaced in the file of each.

Arguments are those of the versions that were tested, transformers 5.23: a function with others is left as it is.
"""

from tarnn.huggingface.patching.convolution import convolve_sequences, convolve_token
from tarnn.huggingface.patching.delta import delta_sequences, delta_token
from tarnn.huggingface.patching.hooks import Family, Hook, on_cpu
from tarnn.huggingface.patching.packed import head_with_packed_rows, layer_with_packed_rows, model_with_packed_rows
from tarnn.huggingface.patching.padding import layer_with_padding
from tarnn.huggingface.patching.ssd import not_fused, ssd_sequences, ssd_token

CONVOLUTION = (
    Hook("causal_conv1d_fn", on_cpu(convolve_sequences), "hidden_states weight bias activation **kwargs"),
    Hook("causal_conv1d_update", on_cpu(convolve_token), "hidden_states conv_state weight bias activation"),
)
_DELTA = "query key value g beta{} initial_state output_final_state use_qk_l2norm_in_kernel **kwargs"
GATED_DELTA = (
    Hook("torch_chunk_gated_delta_rule", on_cpu(delta_sequences), _DELTA.format(" chunk_size")),
    Hook("torch_recurrent_gated_delta_rule", on_cpu(delta_token), _DELTA.format("")),
    *CONVOLUTION,
)
CHANNEL_DELTA = (
    Hook("chunk_kimi_delta_attention", on_cpu(delta_sequences), _DELTA.format(" chunk_size")),
    Hook("recurrent_kimi_delta_attention", on_cpu(delta_token), _DELTA.format("")),
    *CONVOLUTION,
)
SSD = (
    Hook(
        "mamba2_chunk_scan",
        on_cpu(ssd_sequences),
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states **kwargs",
    ),
    Hook(
        "mamba2_selective_state_update",
        on_cpu(ssd_token),
        "state hidden_states dt A B C D dt_bias dt_softplus z **kwargs",
    ),
    Hook(
        "mamba2_split_conv1d_scan_combined",
        on_cpu(not_fused),
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states activation "
        "rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate **kwargs",
    ),
    *CONVOLUTION,
)
MIXER = "self hidden_states cache_params attention_mask **kwargs"
SHORT = "self hidden_states past_key_values attention_mask **kwargs"
TEXT = "self input_ids attention_mask position_ids past_key_values inputs_embeds use_cache **kwargs"


def _layer(name: str, arguments: str = MIXER, **options) -> Hook:
    return Hook(f"{name}.forward", layer_with_padding(**options), arguments)


def _model(name: str, arguments: str = TEXT) -> Hook:
    return Hook(f"{name}.forward", model_with_packed_rows, arguments)


FAMILIES = (
    Family("Qwen3-Next", "qwen3_next", (*GATED_DELTA, _layer("Qwen3NextGatedDeltaNet"), _model("Qwen3NextModel"))),
    Family("Qwen3.5", "qwen3_5", (*GATED_DELTA, _layer("Qwen3_5GatedDeltaNet"), _model("Qwen3_5TextModel"))),
    Family("Qwen3.5-MoE", "qwen3_5_moe", (*GATED_DELTA, _layer("Qwen3_5MoeGatedDeltaNet"), _model("Qwen3_5MoeTextModel"))),
)
