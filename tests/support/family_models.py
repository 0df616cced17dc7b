"""Models of transformers of the released configs and of variants, with random weights, and the logits of their programs."""

import copy

import torch
import transformers as hf

from support.latent_variants import LATENT_VARIANTS
from support.published_configs import PUBLISHED, config_of
from support.ssd_variants import SSD_VARIANTS
from tarnn.program.definition import new_states, run

MODELS: dict[str, hf.PreTrainedModel] = {}


VARIANTS = {  # other options that a family has
    "biases": ("Llama-3.2-1B", {"attention_bias": True, "mlp_bias": True, "rope_scaling": None}),
    "a base and a factor": ("Llama-3.2-1B", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "all heads": ("Mistral-7B-v0.3", {"num_key_value_heads": 4, "head_dim": None}),
    "biases of Qwen3": ("Qwen3-0.6B", {"attention_bias": True}),
    "experts in some layers": (
        "Qwen3-Next-80B-A3B", {"decoder_sparse_step": 2, "num_hidden_layers": 3, "mlp_only_layers": [1], "layer_types": None}
    ),
    "experts in every other layer": (
        "Qwen3-Next-80B-A3B", {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 3}
    ),
    "every number of LFM2-MoE": (
        "LFM2-8B-A1B",
        {"routed_scaling_factor": 1.7, "norm_topk_prob": False, "num_dense_layers": 1, "conv_bias": True,
         "tie_embedding": False, "conv_L_cache": 4, "rope_theta": 100.0, "norm_eps": 0.1},
    ),
    "no bias, normalised, scaled": ("LFM2-8B-A1B", {"use_expert_bias": False, "routed_scaling_factor": 0.6}),
    "every number of MiniMax": (
        "MiniMax-Text-01",
        {"full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.7,
         "linear_attn_beta_factor": 1.2, "mlp_alpha_factor": 1.6, "mlp_beta_factor": 0.9, "rope_theta": 100.0,
         "rms_norm_eps": 0.1, "num_experts_per_tok": 3, "head_dim": None, "tie_word_embeddings": True,
         "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "layers of MiniMax in turns": ("MiniMax-Text-01", {"layer_types": None, "num_key_value_heads": 4}),
    "layers of Lara-mini in turns": ("Lara-4-Mini-Base", {"layer_types": None, "num_hidden_layers": 6, "rope_parameters": None}),
    "every number of Lara-mini": (
        "Lara-4-Mini-Base",
        {"attention_bias": True, "head_dim": 10, "linear_conv_kernel_dim": 3, "norm_topk_prob": False, "rms_norm_eps": 0.1,
         "num_experts_per_tok": 2, "sliding_window": 3, "tie_word_embeddings": False,
         "layer_types": ["sliding_attention", "full_attention", "linear_attention"],
         "rope_parameters": {"rope_theta": 100.0, "rope_type": "linear", "factor": 1.5}},
    ),
    "experts in no layer": ("Qwen3-Next, dense", {"mlp_only_layers": [], "num_experts": 0}),
    "a quarter rotated": ("Qwen3.5, text alone", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),
    "layers by their interval": ("Qwen3.5, text alone", {"layer_types": None, "num_hidden_layers": 3}),
    "rotated": ("Olmo-Hybrid-7B", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rotated by default": ("Olmo-Hybrid-7B", {"rope_parameters": None}),
    "β up to 1, biases": ("Olmo-Hybrid-7B", {"linear_allow_neg_eigval": False, "attention_bias": True}),
    "sizes by default": ("Olmo-Hybrid-7B", dict.fromkeys(("layer_types", "linear_key_head_dim", "linear_value_head_dim"))),
    "biases, other sizes": ("mamba-130m-hf", {
        "use_bias": True, "use_conv_bias": False, "state_size": 7, "conv_kernel": 3, "expand": 3, "intermediate_size": 96,
        "d_inner": 96, "time_step_rank": "auto", "layer_norm_epsilon": 0.3, "tie_word_embeddings": False,
    }),
    "another eps of the parts": ("falcon-mamba-7b", {"mixer_rms_eps": 0.5, "use_bias": True, "expand": 2}),
    "caps, biases, turns": ("recurrentgemma-2b", {
        "attention_bias": True, "num_key_value_heads": 2, "logits_soft_cap": 1.5, "rms_norm_eps": 0.3, "lru_width": 48,
        "block_types": ["attention", "recurrent"], "conv1d_width": 3, "attention_window_size": 4, "head_dim": 24,
        "rope_theta": 50.0, "partial_rotary_factor": 0.75, "tie_word_embeddings": False, "intermediate_size": 70,
    }),
    "caps, biases, factors": ("xLSTM-7b", {
        "use_bias": True, "gate_soft_cap": 1.5, "forget_gate_soft_cap": 1.5, "output_logit_soft_cap": 2.0, "qk_dim_factor": 1.0,
        "v_dim_factor": 1.5, "norm_eps": 0.3, "cell_norm_eps": 0.3, "eps": 0.2, "ffn_proj_factor": 1.3, "num_heads": 2,
        "ffn_round_up_to_multiple_of": 9, "head_dim": 96,
    }),
    "biases, other turns": ("AI21-Jamba-Reasoning-3B", {
        "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_d_state": 5, "mamba_expand": 3,
        "mamba_dt_rank": "auto", "rms_norm_eps": 0.3, "attn_layer_offset": 0, "attn_layer_period": 2, "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }),
    "experts in other turns": ("Jamba-v0.1", {
        "expert_layer_offset": 0, "expert_layer_period": 3, "num_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 4,
        "mamba_dt_rank": "auto", "mamba_proj_bias": True, "rms_norm_eps": 0.3, "tie_word_embeddings": True,
    }),
    "Zamba with all options": ("Zamba-7B-v1", {
        "attention_head_dim": 10, "attn_layer_offset": 0, "attn_layer_period": 2, "hidden_act": "silu", "layers_block_type": None,
        "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_d_state": 5, "mamba_dt_rank": "auto", "mamba_expand": 3,
        "mamba_proj_bias": True, "n_mamba_heads": 3, "num_hidden_layers": 6, "num_key_value_heads": 2, "rms_norm_eps": 0.03,
        "tie_word_embeddings": False,
    }),
    "biases, a group": ("Mamba-Codestral-7B", {"use_bias": True, "use_conv_bias": False, "n_groups": 1}),
    **LATENT_VARIANTS,
    **SSD_VARIANTS,
}  # fmt: skip


def fields_of(name):
    """Fields of a published config, or of a variant of one."""
    base, changes = VARIANTS.get(name, (name, {}))
    return copy.deepcopy(PUBLISHED[base] | changes)


def model_of(name):
    """The model of transformers with random weights that leave nothing near zero or one."""
    if name not in MODELS:
        torch.manual_seed(0)
        config = config_of(fields_of(name))
        kind = hf.AutoModelForImageTextToText if hasattr(config, "text_config") else hf.AutoModelForCausalLM
        model = kind.from_config(config, dtype=torch.float32).eval()
        model.set_experts_implementation("eager")  # which computes in float64, too
        with torch.no_grad():
            for path, x in model.named_parameters():
                if path.endswith("A_log"):
                    x.uniform_(-3, -0.5)
                elif x.ndim > 1:
                    x.normal_(std=x.shape[-1] ** -0.5 if x.ndim == 2 or ".experts." in path else 0.5)
                else:
                    x.add_(torch.randn_like(x), alpha=0.2)
            for path, x in model.named_buffers():
                if path.endswith(("expert_bias", "e_score_correction_bias")):
                    x.normal_(std=0.3)
        MODELS[name] = model
    return MODELS[name]


def defined(program, ids):
    """Logits of rows from their first token on, in float64."""
    states = new_states(program, len(ids), dtype=torch.float64)
    return run(program, ids, states, positions=[0] * len(ids), dtype=torch.float64)[0]
