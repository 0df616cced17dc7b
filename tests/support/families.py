"""Tiny random models of many families of transformers, and inputs for them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as hf

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"vocab_size": 99, "max_position_embeddings": 64}
LONG = {**SIZE, "vocab_size": 99, "max_position_embeddings": 66}
GROUPED = {**SIZE, **TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
PATCHES = {**SIZE, "image_size": 16, "patch_size": 4}
WAVE = {
    **SIZE,
    "vocab_size": 32,
    "conv_dim": (32,) * 3,
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 3),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "attention_dropout": 0.0,
}
SEQUENCES = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 99,
}


class Family(NamedTuple):
    kind: str  # decoder, encoder, vision, speech, sequences
    config: Callable[[], Any]


FAMILIES = {
    "Llama": Family("decoder", lambda: hf.LlamaConfig(**GROUPED)),
    "Qwen2": Family("decoder", lambda: hf.Qwen2Config(**GROUPED)),
    "Qwen3": Family("decoder", lambda: hf.Qwen3Config(**GROUPED, head_dim=8)),
    "Gemma": Family("decoder", lambda: hf.GemmaConfig(**GROUPED, head_dim=8)),
    "Gemma 3": Family(
        "decoder",
        lambda: hf.Gemma3TextConfig(
            **GROUPED, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
    "GPT-2": Family(
        "decoder",
        lambda: hf.GPT2Config(
            vocab_size=99, n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1
        ),
    ),
    "GPT-NeoX": Family("decoder", lambda: hf.GPTNeoXConfig(**SIZE, **TEXT)),
    "Mistral": Family("decoder", lambda: hf.MistralConfig(**GROUPED, sliding_window=None)),
    "Mixtral": Family("decoder", lambda: hf.MixtralConfig(**GROUPED, num_local_experts=2)),
    "Phi": Family("decoder", lambda: hf.PhiConfig(**SIZE, **TEXT)),
    "Phi 3": Family("decoder", lambda: hf.Phi3Config(**GROUPED, bos_token_id=1, eos_token_id=2)),
    "OLMo": Family("decoder", lambda: hf.OlmoConfig(**GROUPED, eos_token_id=2)),
    "OLMo 2": Family("decoder", lambda: hf.Olmo2Config(**GROUPED, eos_token_id=2)),
    "StableLM": Family("decoder", lambda: hf.StableLmConfig(**GROUPED)),
    "StarCoder 2": Family(
        "decoder", lambda: hf.Starcoder2Config(**GROUPED, sliding_window=None, bos_token_id=1, eos_token_id=2)
    ),
    "Cohere": Family("decoder", lambda: hf.CohereConfig(**GROUPED, bos_token_id=1, eos_token_id=2)),
    "SmolLM 3": Family("decoder", lambda: hf.SmolLM3Config(**GROUPED, bos_token_id=1, eos_token_id=2)),
    "Granite": Family("decoder", lambda: hf.GraniteConfig(**GROUPED)),
    "OPT": Family(
        "decoder", lambda: hf.OPTConfig(**SIZE, **TEXT, ffn_dim=64, word_embed_proj_dim=32, attention_dropout=0.0)
    ),
    "BERT": Family("encoder", lambda: hf.BertConfig(**SIZE, **TEXT)),
    "RoBERTa": Family("encoder", lambda: hf.RobertaConfig(**LONG)),
    "XLM-RoBERTa": Family("encoder", lambda: hf.XLMRobertaConfig(**LONG)),
    "ModernBERT": Family(
        "encoder",
        lambda: hf.ModernBertConfig(
            **SIZE, **TEXT, local_attention=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
        ),
    ),
    "DistilBERT": Family(
        "encoder",
        lambda: hf.DistilBertConfig(
            vocab_size=99, max_position_embeddings=64, dim=32, n_layers=2, n_heads=4, hidden_dim=64
        ),
    ),
    "ELECTRA": Family("encoder", lambda: hf.ElectraConfig(**SIZE, **TEXT, embedding_size=32)),
    "ALBERT": Family("encoder", lambda: hf.AlbertConfig(**SIZE, **TEXT, embedding_size=16)),
    "CLIP, text": Family("encoder", lambda: hf.CLIPTextConfig(**SIZE, **TEXT, bos_token_id=1, eos_token_id=2)),
    "CLIP, vision": Family("vision", lambda: hf.CLIPVisionConfig(**PATCHES)),
    "SigLIP": Family("vision", lambda: hf.SiglipVisionConfig(**PATCHES)),
    "ViT": Family("vision", lambda: hf.ViTConfig(**PATCHES)),
    "DeiT": Family("vision", lambda: hf.DeiTConfig(**PATCHES)),
    "DINOv2": Family("vision", lambda: hf.Dinov2Config(**PATCHES)),
    "wav2vec 2.0": Family("speech", lambda: hf.Wav2Vec2Config(**WAVE)),
    "HuBERT": Family("speech", lambda: hf.HubertConfig(**WAVE)),
    "Whisper": Family(
        "sequences of sound",
        lambda: hf.WhisperConfig(
            **SEQUENCES, num_mel_bins=8, max_source_positions=30, max_target_positions=20, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1,
        ),
    ),
    "BART": Family("sequences", lambda: hf.BartConfig(**SEQUENCES, max_position_embeddings=64)),
}  # fmt: skip

REFUSED = {
    "T5": (lambda: hf.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4), "position_bias"),
    "BEiT": (lambda: hf.BeitConfig(**PATCHES, use_relative_position_bias=True), "mask of shape"),
}


def model_of(family: Family, name: str = "sdpa"):
    """The family's model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    kind = hf.AutoModelForCausalLM if family.kind == "decoder" else hf.AutoModel
    return kind.from_config(family.config(), attn_implementation=name).eval()


def inputs_of(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """What such a model is fed with: whole, and padded where that is possible; two of each."""
    torch.manual_seed(0)
    ids = torch.randint(3, 99, (2, 40))
    if kind in ("decoder", "encoder"):
        sides = {"right": slice(33, None), **({"left": slice(0, 7)} if kind == "decoder" else {})}
        found = {"whole": {"input_ids": ids}}
        for side, masked in sides.items():
            mask = torch.ones_like(ids)
            mask[1, masked] = 0
            found[side] = {"input_ids": ids, "attention_mask": mask}
        return found
    return {
        "vision": {"whole": {"pixel_values": torch.randn(2, 3, 16, 16)}},
        "speech": {"whole": {"input_values": torch.randn(2, 1200)}},
        "sequences of sound": {"whole": {"input_features": torch.randn(2, 8, 60), "decoder_input_ids": ids[:, :10]}},
        "sequences": {"whole": {"input_ids": ids, "decoder_input_ids": ids[:, :10]}},
    }[kind]
