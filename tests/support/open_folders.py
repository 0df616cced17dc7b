"""Tiny folders of models of transformers, one of each family that `tarnn.load` opens, with a tokenizer and a chat template."""

import copy

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from support.published_configs import PUBLISHED, config_of

SIZE = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
HEADS = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
IMAGES = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
DENSE = {"mlp_only_layers": [0, 1], "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
FILTERS = {
    **{name: x for name, x in HEADS.items() if name != "head_dim"},
    "layer_types": ["conv", "full_attention"],
    "tie_word_embeddings": True,
}
CONFIGS = {
    "Llama": lambda: hf.LlamaConfig(**HEADS),
    "Mistral": lambda: hf.MistralConfig(**HEADS, sliding_window=None),
    "Qwen2": lambda: hf.Qwen2Config(**HEADS, tie_word_embeddings=True),
    "Qwen3": lambda: hf.Qwen3Config(**HEADS),
    "Qwen3.5": lambda: hf.Qwen3_5TextConfig(**HEADS, **DELTA),
    "Qwen3.5 with images": lambda: hf.Qwen3_5Config(text_config=HEADS | DELTA, vision_config=IMAGES),
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(**HEADS, **DELTA, **DENSE),
    "OLMo-hybrid": lambda: hf.OlmoHybridConfig(**HEADS, **DELTA | {"linear_num_key_heads": 4}),
    "LFM2": lambda: hf.Lfm2Config(**FILTERS),
    "Mamba": lambda: hf.MambaConfig(**SIZE),
    "Mamba-2": lambda: hf.Mamba2Config(**SIZE, num_heads=8, head_dim=8, state_size=16, n_groups=2),
}
if hasattr(hf, "Lfm3Config"):  # from transformers 5.24 on
    CONFIGS_OF_5_24 = {
        "LFM3": lambda: hf.Lfm3Config(
            **HEADS,
            layer_types=["conv", "sliding_attention"],
            sliding_window=5,
            conv_L_cache=3,
            tie_word_embeddings=True,
        )
    }
else:
    CONFIGS_OF_5_24 = {}
SHORT = {  # names of released models (`published_configs`) whose families are above
    "LFM2-1.2B": "LFM2",
    "Llama-3.2-1B": "Llama",
    "Mistral-7B-v0.3": "Mistral",
    "Qwen2.5-0.5B": "Qwen2",
    "Qwen3-0.6B": "Qwen3",
    "Qwen3.5, text alone": "Qwen3.5",
    "Qwen3.5-0.8B": "Qwen3.5 with images",
    "Qwen3-Next, dense": "Qwen3-Next",
    "Olmo-Hybrid-7B": "OLMo-hybrid",
    "Mamba-Codestral-7B": "Mamba-2",
    "mamba-130m-hf": "Mamba",
}
RELEASED = [name for name in PUBLISHED if name not in SHORT]  # folders of these are packed and served in tests, no more
EVERY = (*CONFIGS, *CONFIGS_OF_5_24, *RELEASED)
# one of each kind; the others are slow tests
EACH_COMMIT = ("Llama", "Qwen3.5", "Mamba-2", "Jamba-v0.1", "Kimi-Linear-48B-A3B")
PACKED_AND_SERVED = [pytest.param(x, marks=() if x in EACH_COMMIT else pytest.mark.slow) for x in (*CONFIGS, *RELEASED)]
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def make_folder(folder, family, dtype=torch.float32, *, begins=False, scale=8, **config):
    """Save a model with random weights. begins: its tokenizer puts <|bos|> before each text. config: other values of keys.

    scale: of matrices, or all tokens are about as likely. Large ones also make rounding errors grow from layer to layer.
    """
    torch.manual_seed(0)
    made = released(family) if family in RELEASED else (CONFIGS | CONFIGS_OF_5_24)[family]()
    for name, value in config.items():
        setattr(made, name, value)
    kind = hf.AutoModelForImageTextToText if hasattr(made, "text_config") else hf.AutoModelForCausalLM
    model = kind.from_config(made, dtype=torch.float32).to(dtype)
    with torch.no_grad():
        for name, x in model.named_parameters():
            x *= scale if x.ndim > 1 and not name.endswith("A_log") else 1  # A_log is an exponent
    model.generation_config.eos_token_id = [257, 259]
    model.save_pretrained(folder)
    byte_level(begins=begins).save_pretrained(folder)
    return folder


def released(name):
    """The config of a released model, made narrower, for the tokenizer's tokens."""
    fields, tokens = (
        copy.deepcopy(PUBLISHED[name]),
        {x: SIZE[x] for x in SIZE if x.endswith(("token_id", "vocab_size"))},
    )
    fields.get("text_config", fields).update(tokens)
    return config_of(fields)


def byte_level(*, begins=False):
    """A tokenizer whose tokens are bytes, and three special ones."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special, chat_template=TEMPLATE)
    if begins:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", 256)]
        )
    return tokenizer
