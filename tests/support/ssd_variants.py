"""Variants of released configs with Mamba-2's mixers: every number is another than the one that leaves things as they are."""

from typing import Any

LIMIT = {"time_step_limit": [0.9, 1.5]}
MIXER = {"mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 2, "mamba_proj_bias": True, **LIMIT}
BIASES = {"attention_bias": True, "mlp_bias": True}
FALCON = {
    **MIXER,
    **BIASES,
    "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 1.3,
    "embedding_multiplier": 2.5,
    "head_dim": 10,
    "key_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": True,
    "mlp_multipliers": [1.4, 0.7],
    "projectors_bias": True,
    "rms_norm_eps": 0.03,
    "rope_theta": 30.0,
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.6, 0.9],
    "ssm_out_multiplier": 0.75,
}
GRANITE = {
    **MIXER,
    "attention_bias": True,
    "attention_multiplier": 0.9,
    "embedding_multiplier": 0.8,
    "logits_scaling": 2.5,
    "position_embedding_type": "rope",
    "residual_multiplier": 0.6,
    "rms_norm_eps": 0.03,
    "rope_theta": 30.0,
    "tie_word_embeddings": False,
}
ZAMBA2 = {
    "add_bias_linear": True,
    "hidden_act": "silu",
    "hybrid_layer_ids": [0, 2, 3],
    "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid"],
    "mamba_d_conv": 3,
    "mamba_ngroups": 2,
    "num_mem_blocks": 2,
    "rms_norm_eps": 0.03,
    "rope_theta": 30.0,
    "time_step_min": 0.6,
}

SSD_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Bamba with all options": (
        "Bamba-9B",
        {
            **MIXER,
            **BIASES,
            "mamba_d_head": "auto",
            "rms_norm_eps": 0.03,
            "rope_theta": 30.0,
            "partial_rotary_factor": None,
        },
    ),
    "Granite 4 with all options": ("Granite-4.0-h-micro", GRANITE),
    "Granite 4, experts with all options": ("Granite-4.0-h-tiny", {**GRANITE, "num_experts_per_tok": 2}),
    "Falcon-H1 with all options": ("Falcon-H1-0.5B", FALCON),
    "Falcon-H1, gated, then normed": ("Falcon-H1-0.5B", {**FALCON, "mamba_norm_before_gate": False}),
    "Falcon-H1, as many channels as usual": (
        "Falcon-H1-0.5B",
        {"mamba_d_ssm": None, "mamba_n_heads": 8, "mlp_multipliers": None, "ssm_multipliers": None},
    ),
    "Nemotron-H with all options": (
        "Nemotron-H-8B",
        {
            "conv_kernel": 3,
            "head_dim": 10,
            "attention_head_dim": None,
            "hybrid_override_pattern": None,
            "layer_norm_epsilon": 0.03,
            "layers_block_type": ["mlp", "mamba", "attention", "linear_attention", "full_attention"],
            "mamba_head_dim": 6,
            "mlp_bias": True,
            "mlp_hidden_act": "silu",
            "n_groups": 4,
            "time_step_min": 0.6,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "Nemotron 3, normalised in groups": (
        "Nemotron-3-Nano-30B-A3B",
        {"n_group": 2, "num_hidden_layers": 3, "hybrid_override_pattern": "ME*"},
    ),
    "Nemotron 3, experts with all options": (
        "Nemotron-3-Nano-30B-A3B",
        {
            "hybrid_override_pattern": "E-M*E",
            "intermediate_size": 20,
            "mlp_bias": True,
            "mlp_hidden_act": "silu",
            "moe_latent_size": 14,
            "n_group": 4,
            "norm_topk_prob": False,
            "num_experts_per_tok": 2,
            "head_dim": 10,
            "layer_norm_epsilon": 0.03,
            "time_step_min": 0.6,
            "routed_scaling_factor": 1.3,
            "topk_group": 2,
        },
    ),
    "Zamba2 with all options": ("Zamba2-1.2B", ZAMBA2),
    "Zamba2 without positions": (
        "Zamba2-1.2B",
        {
            **ZAMBA2,
            "num_key_value_heads": 2,
            "num_query_groups": None,
            "tie_word_embeddings": False,
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
        },
    ),
}
