"""Variants of Kimi Linear and Ling 3 in which every number of the config matters."""

LATENT_VARIANTS = {
    "latent queries, biases": ("Kimi-Linear-48B-A3B", {"q_lora_rank": 11, "attention_bias": True, "rms_norm_eps": 0.01}),
    "sizes outside": (
        "Kimi-Linear-48B-A3B",
        {
            "linear_attn_config": {}, "linear_head_dim": 6, "linear_num_heads": 5, "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "dense"],
        },
    ),
    "groups of experts": (
        "Kimi-Linear-48B-A3B",
        {
            "num_expert_group": 4, "topk_group": 2, "moe_renormalize": False, "routed_scaling_factor": 1.7,
            "num_shared_experts": 2, "num_experts_per_token": 3, "first_k_dense_replace": 0,
        },
    ),
    "other bounds and angles": (
        "Ling-3.0-Flash",
        {"kda_lower_bound": -0.7, "rope_parameters": None, "rope_theta": 50.0, "layer_group_size": 3, "num_experts_per_tok": 3,
         "routed_scaling_factor": 0.7, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    "decays without bound": (
        "Ling-3.0-Flash",
        {"kda_safe_gate": False, "q_lora_rank": 11, "attention_bias": True, "short_conv_kernel_size": 3, "rms_norm_eps": 0.01,
         "num_shared_experts": 2, "norm_topk_prob": False, "first_k_dense_replace": 1},
    ),
}  # fmt: skip
