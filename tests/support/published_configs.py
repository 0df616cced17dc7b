"""config.json of released models, every key, narrower: sizes alone are others."""

from typing import Any

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 99}
TRAINED = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
FOUR = {**TOKENS, **TRAINED, "torch_dtype": "bfloat16", "transformers_version": "4.45.0"}
SOFTMAX = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {
        **FOUR,
        **SOFTMAX,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 10,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.3": {
        **FOUR,
        **SOFTMAX,
        "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        **FOUR,
        **SOFTMAX,
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "Qwen3-0.6B": {
        **FOUR,
        **SOFTMAX,
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 12,
        "max_position_embeddings": 40960,
        "max_window_layers": 2,
        "model_type": "qwen3",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
}
