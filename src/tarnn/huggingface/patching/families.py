"""The families of transformers whose linear layers tarnn computes, and what is replaced in the file of each.

Arguments are those of the versions that were tested, a cache by its new name: a function with others is left as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

from tarnn.huggingface.foreign_forward import foreign_generate, foreign_head
from tarnn.huggingface.head_loss import head_with_loss
from tarnn.huggingface.patching.convolution import convolve_sequences, convolve_token
from tarnn.huggingface.patching.delta import delta_sequences, delta_token
from tarnn.huggingface.patching.elementwise import centered_norm_layer, mlp_layer, norm_layer
from tarnn.huggingface.patching.griffin import griffin_block, griffin_model
from tarnn.huggingface.patching.hooks import Family, Hook, on_cpu
from tarnn.huggingface.patching.lightning import lightning_layer, lightning_model
from tarnn.huggingface.patching.mlstm import mlstm_backend, mlstm_model
from tarnn.huggingface.patching.packed import (
    head_with_packed_rows,
    layer_with_packed_rows,
    model_with_packed_masks,
    model_with_packed_rows,
    silent_model_with_packed_rows,
)
from tarnn.huggingface.patching.padding import layer_with_padding
from tarnn.huggingface.patching.selective import scan_layer, scan_sequences, scan_token
from tarnn.huggingface.patching.ssd import not_fused, ssd_sequences, ssd_token
from tarnn.huggingface.patching.undo import layer_with_undo
from tarnn.huggingface.versions import decoding_by_one_name, head_with_one_name, inputs_by_one_name

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
SCAN = (
    Hook(
        "mamba_selective_scan",
        on_cpu(scan_sequences),
        "hidden_states dt A B C D z delta_bias delta_softplus return_last_state use_mambapy use_associative_scan **kwargs",
    ),
    Hook(
        "mamba_selective_state_update",
        on_cpu(scan_token),
        "state hidden_states dt A B C D dt_bias dt_softplus z **kwargs",
    ),
    *CONVOLUTION,
)
SCAN_FUSED = Hook(
    "mamba_inner_fn",
    on_cpu(not_fused),
    "xz conv1d_weight conv1d_bias x_proj_weight delta_proj_weight out_proj_weight out_proj_bias A B C D delta_bias "
    "delta_softplus b_rms_weight c_rms_weight dt_rms_weight b_c_dt_rms_eps **kwargs",
)
MIXER = "self hidden_states cache attention_mask **kwargs"
TEXT = "self input_ids attention_mask position_ids cache inputs_embeds use_cache **kwargs"
MAMBA = "self input_ids inputs_embeds cache use_cache output_hidden_states return_dict attention_mask **kwargs"
GENERATE = (
    "self inputs generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn synced_gpus "
    "assistant_model streamer negative_prompt_ids negative_prompt_attention_mask custom_generate **kwargs"
)
MAMBA_HEAD = (
    "self input_ids inputs_embeds cache labels output_hidden_states return_dict use_cache attention_mask "
    "logits_to_keep **kwargs"
)


ASSISTED = (
    "self input_ids logits_processor stopping_criteria generation_config synced_gpus streamer inputs_tensor assistant_model "
    "assistant_tokenizer tokenizer **model_kwargs"
)
PREPARED = "self input_ids inputs_embeds use_cache cache attention_mask is_first_iteration **kwargs"
GRIFFIN = "self input_states position_ids attention_mask use_cache **kwargs"
MLSTM = "self query key value igate fgate c_initial n_initial m_initial return_last_states mode"
LIGHTNING = "self hidden_states position_embeddings attention_mask cache **kwargs"


MAMBA_1_HEAD = (
    "self input_ids attention_mask inputs_embeds cache labels output_hidden_states return_dict use_cache "
    "logits_to_keep **kwargs"
)
TEXT_HEAD = TEXT.replace("use_cache", "labels use_cache logits_to_keep")
ROUTED_HEAD = TEXT.replace("use_cache", "labels use_cache output_router_logits logits_to_keep")
_IMAGES = "pixel_values pixel_values_videos image_grid_thw video_grid_thw{} mm_token_type_ids{} logits_to_keep mm_encoder_outputs"
IMAGE_HEAD = TEXT.replace("use_cache", f"labels {_IMAGES.format('', '')}")
ROUTED_IMAGE_HEAD = TEXT.replace("use_cache", f"labels {_IMAGES.format('', ' output_router_logits')}")
GLM_HEAD = TEXT.replace("use_cache", f"labels use_cache {_IMAGES.format(' output_router_logits', '')}")


def _loss(name: str, arguments: str = TEXT_HEAD, **how: Any) -> Hook:
    """Hook a language model in training, whose loss needs no logits; how it makes them, a `Head` says."""
    return Hook(f"{name}.forward", functools.partial(head_with_loss, **how), arguments)


LOSSES = {  # of the families whose heads are hooked for nothing else
    "Qwen3.5": (_loss("Qwen3_5ForConditionalGeneration", IMAGE_HEAD),),
    "Qwen3.5-MoE": (
        _loss("Qwen3_5MoeForCausalLM", ROUTED_HEAD),
        _loss("Qwen3_5MoeForConditionalGeneration", ROUTED_IMAGE_HEAD),
    ),
    "Qwen4-exp": (
        _loss("Qwen4ExpForCausalLM", ROUTED_HEAD),
        _loss("Qwen4ExpForConditionalGeneration", ROUTED_IMAGE_HEAD),
    ),
    "Lara-mini": (_loss("LaraMiniForCausalLM", ROUTED_HEAD),),
    "Kimi Linear": (_loss("KimiLinearForCausalLM"),),
    "GLM-5-next": (_loss("Glm5NextForConditionalGeneration", GLM_HEAD),),
    "Bailing hybrid": (_loss("BailingHybridForCausalLM"),),
    "LFM2-MoE": (_loss("Lfm2MoeForCausalLM"),),
    "LFM3": (_loss("Lfm3ForCausalLM"),),
    "MiniMax": (_loss("MiniMaxForCausalLM", ROUTED_HEAD),),
    "Jamba": (_loss("JambaForCausalLM", ROUTED_HEAD),),
    "Zamba": (_loss("ZambaForCausalLM"),),
    "Zamba2": (_loss("Zamba2ForCausalLM"),),
    "Bamba": (_loss("BambaForCausalLM"),),
    "Falcon-H1": (_loss("FalconH1ForCausalLM", factor=lambda model: model.model.lm_head_multiplier),),
    "Granite 4": (
        _loss(
            "GraniteMoeHybridForCausalLM",
            ROUTED_HEAD.replace(" use_cache", ""),
            factor=lambda model: 1 / model.config.logits_scaling,
        ),
    ),
    "Nemotron-H": (_loss("NemotronHForCausalLM", in_float32=True),),
}


def _composed(*replace: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Compose wrappers; the first is the outermost."""
    return lambda original: functools.reduce(lambda inner, outer: outer(inner), reversed(replace), original)


def _layer(name: str, arguments: str = MIXER, recurrent: bool = True, **options) -> Hook:
    replace = layer_with_padding(**options)
    return Hook(f"{name}.forward", _composed(replace, layer_with_undo) if recurrent else replace, arguments)


def _model(name: str, arguments: str = TEXT) -> Hook:
    return Hook(f"{name}.forward", model_with_packed_rows, arguments)


def _family(
    name: str, module: str, functions: tuple[Hook, ...], layer: str, model: str, recurrent: bool = True
) -> Family:
    return Family(name, module, (*functions, _layer(layer, recurrent=recurrent), _model(model)))


def _scan_layer(name: str) -> Hook:
    return Hook(
        f"{name}.forward", _composed(layer_with_padding(), layer_with_undo, layer_with_packed_rows, scan_layer), MIXER
    )


def _around(short: str, first: str = "x", gated: bool = True, **mlp: str) -> tuple[Hook, ...]:
    """Hook the norms and SwiGLU of a family. Norms call their argument `first`; those of an `x` are centered."""
    norm = Hook(f"{short}RMSNorm.forward", centered_norm_layer if first == "x" else norm_layer, f"self {first}")
    gate = Hook(f"{short}RMSNormGated.forward", norm_layer, "self hidden_states gate")
    return norm, *[gate] * gated, Hook(f"{short}MLP.forward", mlp_layer(**mlp), "self x")


def _with_step(short: str, family: Family, arguments: str = TEXT_HEAD) -> Family:
    """A family that has a fused step: its head asks it first, and `generate` enters it. Training makes no logits."""
    head = Hook(f"{short}ForCausalLM.forward", _composed(foreign_head, head_with_loss), arguments)
    return family._replace(
        hooks=(*family.hooks, head, Hook(f"{short}ForCausalLM.generate", foreign_generate, GENERATE))
    )


def _mamba_head(name: str, arguments: str, *asks: Callable[[Callable], Callable]) -> tuple[Hook, ...]:
    loss = functools.partial(head_with_loss, body="backbone", hands_on=False, in_float32=True)
    return (
        Hook(f"{name}.forward", _composed(head_with_one_name, *asks, head_with_packed_rows, loss), arguments),
        Hook(f"{name}.prepare_inputs_for_generation", inputs_by_one_name, PREPARED),
        Hook(f"{name}._assisted_decoding", decoding_by_one_name, ASSISTED),
    )


def _mamba(name: str, module: str, short: str) -> Family:
    model = Hook(f"{short}Model.forward", silent_model_with_packed_rows, MAMBA)
    head = _mamba_head(f"{short}ForCausalLM", MAMBA_1_HEAD)
    return Family(name, module, (*SCAN, SCAN_FUSED, _scan_layer(f"{short}Mixer"), model, *head))


def _inkling(name: str) -> tuple[Hook, ...]:
    arguments = MIXER.replace("attention_mask", "conv_mask")
    return _layer(f"{name}ShortConvolution", arguments, recurrent=False, mask="conv_mask"), _model(f"{name}TextModel")


_MAMBA_2 = (
    *_mamba_head("Mamba2ForCausalLM", MAMBA_HEAD, foreign_head),
    Hook("Mamba2ForCausalLM.generate", foreign_generate, GENERATE),
)


_FAMILIES = (
    _with_step(
        "Qwen3Next",
        _family(
            "Qwen3-Next",
            "qwen3_next",
            (*GATED_DELTA, *_around("Qwen3Next")),
            "Qwen3NextGatedDeltaNet",
            "Qwen3NextModel",
        ),
        ROUTED_HEAD,
    ),
    _with_step(
        "Qwen3_5",
        _family("Qwen3.5", "qwen3_5", (*GATED_DELTA, *_around("Qwen3_5")), "Qwen3_5GatedDeltaNet", "Qwen3_5TextModel"),
    ),
    _family(
        "Qwen3.5-MoE",
        "qwen3_5_moe",
        (*GATED_DELTA, *_around("Qwen3_5Moe")),
        "Qwen3_5MoeGatedDeltaNet",
        "Qwen3_5MoeTextModel",
    ),
    Family(
        "Qwen4-exp",
        "qwen4_exp",
        (
            *GATED_DELTA,
            _layer("Qwen4ExpTextGatedDeltaNet"),
            _layer(
                "Qwen4ExpTextPLELayer",
                "self hidden_states input_ids cache conv_mask",
                recurrent=False,
                mask="conv_mask",
            ),
            _model("Qwen4ExpTextModel", TEXT.replace("**kwargs", "ple_input_ids **kwargs")),
        ),
    ),
    _with_step(
        "OlmoHybrid",
        _family(
            "OLMo-hybrid",
            "olmo_hybrid",
            (*GATED_DELTA, *_around("OlmoHybrid", "hidden_states")),
            "OlmoHybridGatedDeltaNet",
            "OlmoHybridModel",
        ),
    ),
    _family("Lara-mini", "lara_mini", GATED_DELTA, "LaraMiniGatedDeltaNet", "LaraMiniModel"),
    _family(
        "Kimi Linear",
        "kimi_linear",
        (*CHANNEL_DELTA, *_around("KimiLinear", "hidden_states", gated=False)),
        "KimiLinearDeltaAttention",
        "KimiLinearModel",
    ),
    _family("GLM-5-next", "glm5_next", CHANNEL_DELTA, "Glm5NextTextLinearAttention", "Glm5NextTextModel"),
    _family("Bailing hybrid", "bailing_hybrid", CHANNEL_DELTA, "BailingHybridDeltaAttention", "BailingHybridModel"),
    _with_step(
        "Lfm2",
        _family(
            "LFM2",
            "lfm2",
            (*CONVOLUTION, *_around("Lfm2", "hidden_states", gated=False, gate="w1", up="w3", down="w2")),
            "Lfm2ShortConv",
            "Lfm2Model",
            recurrent=False,
        ),
    ),
    _family("LFM2-MoE", "lfm2_moe", CONVOLUTION, "Lfm2MoeShortConv", "Lfm2MoeModel", recurrent=False),
    _family("LFM3", "lfm3", CONVOLUTION, "Lfm3ShortConv", "Lfm3Model", recurrent=False),
    Family("Inkling", "inkling", (*CONVOLUTION, *_inkling("Inkling"))),
    Family("Inkling 2", "inkling2", (*CONVOLUTION, *_inkling("Inkling2")), tested="5.23"),
    Family(
        "RecurrentGemma",
        "recurrent_gemma",
        (
            Hook("RecurrentGemmaRecurrentBlock.forward", griffin_block, GRIFFIN),
            Hook(
                "RecurrentGemmaModel.forward",
                griffin_model,
                "self input_ids position_ids attention_mask inputs_embeds use_cache cache **kwargs",
            ),
        ),
    ),
    Family(
        "xLSTM",
        "xlstm",
        (
            Hook("xLSTMBackend.forward", mlstm_backend, MLSTM),
            Hook("xLSTMModel.forward", mlstm_model, "self input_ids inputs_embeds cache use_cache **kwargs"),
        ),
    ),
    Family(
        "MiniMax",
        "minimax",
        (
            Hook("MiniMaxLightningAttention.forward", _composed(layer_with_padding(), lightning_layer), LIGHTNING),
            Hook("MiniMaxModel.forward", lightning_model, TEXT),
        ),
    ),
    _mamba("Mamba", "mamba", "Mamba"),
    _mamba("Falcon-Mamba", "falcon_mamba", "FalconMamba"),
    Family(
        "Jamba",
        "jamba",
        (
            *SCAN,
            SCAN_FUSED,
            _scan_layer("JambaMambaMixer"),
            Hook("JambaModel.forward", _composed(silent_model_with_packed_rows, model_with_packed_rows), TEXT),
        ),
    ),
    Family("Zamba", "zamba", (*SCAN, _scan_layer("ZambaMambaMixer"), _model("ZambaModel"))),
    Family("Mamba-2", "mamba2", (*SSD, _layer("Mamba2Mixer"), _model("Mamba2Model", MAMBA), *_MAMBA_2)),
    _family("Zamba2", "zamba2", SSD, "Zamba2MambaMixer", "Zamba2Model"),
    _family("Bamba", "bamba", SSD, "BambaMixer", "BambaModel"),
    _family("Falcon-H1", "falcon_h1", SSD, "FalconH1Mixer", "FalconH1Model"),
    Family(
        "Granite 4",
        "granitemoehybrid",
        (
            *SSD,
            _layer("GraniteMoeHybridMambaLayer"),
            Hook("GraniteMoeHybridModel.forward", model_with_packed_masks, TEXT),
        ),
    ),
    Family(
        "Nemotron-H",
        "nemotron_h",
        (
            *SSD,
            _layer("NemotronHMamba2Mixer"),
            _model(
                "NemotronHModel", "self input_ids inputs_embeds position_ids cache use_cache attention_mask **kwargs"
            ),
        ),
    ),
)

FAMILIES = tuple(x._replace(hooks=(*x.hooks, *LOSSES.get(x.name, ()))) for x in _FAMILIES)
