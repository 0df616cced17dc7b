"""Tiny random models of the linear families of transformers, whose layers `patch_transformers` replaces."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from tarnn.huggingface.versions import ONE_NAME, as_called, cache_of

SIZE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
FEW = {**{x: GROUPED[x] for x in GROUPED if x != "head_dim"}, "intermediate_size": 32}
HEADS = {**GROUPED, "intermediate_size": 32}
LATENT = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32, "q_lora_rank": 16}
LATENT |= {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}
DENSE = {"mlp_layer_types": ["dense", "dense"]}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **MIXED,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
CHANNELS = {**MIXED, "linear_num_heads": 4, "linear_head_dim": 8}
INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 128}
SCAN = {"mamba_d_state": 4, "mamba_dt_rank": 4}
SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 16}
ONE_IN_TWO = {"layers_block_type": ["linear_attention", "hybrid"]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
SINKS = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 16,
    "d_rel": 4,
}
SINKS |= {"rel_extent": 16, "n_routed_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(**HEADS, **SHARED, **DELTA),
    "Qwen3.5": lambda: hf.Qwen3_5TextConfig(**HEADS, **DELTA),
    "Qwen3.5-MoE": lambda: hf.Qwen3_5MoeTextConfig(**HEADS, **SHARED, **DELTA),
    "Qwen4-exp": lambda: hf.Qwen4ExpTextConfig(
        **HEADS, **SHARED, **DELTA, **INDEXER, indexer_compress_ratio=4, hc_count=2, hc_lowrank=8, ple_layer_ids=[1],
        heads_per_ngram=2, ngram_vocab_size_base=64, make_ngram_vocab_size_divisible_by=8, split_ngram_parts=2,
    ),
    "OLMo-hybrid": lambda: hf.OlmoHybridConfig(**HEADS, **DELTA | {"linear_num_key_heads": 4}),
    "Lara-mini": lambda: hf.LaraMiniConfig(**GROUPED, **SHARED, **DELTA),
    "Kimi Linear": lambda: hf.KimiLinearConfig(**LATENT, **DENSE, **CHANNELS),
    "GLM-5-next": lambda: hf.Glm5NextTextConfig(
        **LATENT | {"qk_rope_head_dim": 0}, **DENSE, **CHANNELS, index_topk=128, index_head_dim=8, index_n_heads=2,
        index_kpool=1, hc_mult=2,
    ),
    "Bailing hybrid": lambda: hf.BailingHybridConfig(**LATENT, **DENSE, **MIXED, head_dim=8),
    "MiniMax": lambda: hf.MiniMaxConfig(**HEADS, num_local_experts=2, num_experts_per_tok=2, block_size=16, **MIXED),
    "Mamba": lambda: hf.MambaConfig(**SIZE, state_size=4),
    "Falcon-Mamba": lambda: hf.FalconMambaConfig(**SIZE, state_size=4),
    "Jamba": lambda: hf.JambaConfig(
        **HEADS, **SCAN, num_experts=2, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2,
    ),
    "Zamba": lambda: hf.ZambaConfig(
        **FEW | {"num_hidden_layers": 3}, **SCAN, layers_block_type=["linear_attention", "hybrid", "hybrid"],
        n_mamba_heads=2,
    ),
    "Mamba-2": lambda: hf.Mamba2Config(**SIZE, num_heads=8, head_dim=8, state_size=16, n_groups=2, chunk_size=16),
    "Zamba2": lambda: hf.Zamba2Config(**FEW, **ONE_IN_TWO, mamba_d_state=16, n_mamba_heads=8, chunk_size=16),
    "Bamba": lambda: hf.BambaConfig(**FEW, **SSD, attn_layer_indices=[1]),
    "Falcon-H1": lambda: hf.FalconH1Config(**HEADS, **SSD, mamba_d_ssm=64),
    "Granite 4": lambda: hf.GraniteMoeHybridConfig(
        **FEW, **MIXED, **SSD, shared_intermediate_size=32, num_local_experts=2, num_experts_per_tok=2
    ),
    "Nemotron-H": lambda: hf.NemotronHConfig(
        **HEADS, layers_block_type=["mamba", "attention"], mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=16,
        n_groups=2, chunk_size=16,
    ),
    "LFM2": lambda: hf.Lfm2Config(**HEADS, **CONVOLUTION),
    "LFM2-MoE": lambda: hf.Lfm2MoeConfig(**HEADS, **EXPERTS, **CONVOLUTION, num_dense_layers=1),
    "LFM3": lambda: hf.Lfm3Config(**HEADS, **CONVOLUTION),
    "Inkling": lambda: hf.InklingTextConfig(**HEADS, **SINKS, **DENSE),
    "Inkling 2": lambda: hf.Inkling2TextConfig(**GROUPED, **SINKS, unpadded_vocab_size=99),
    "RecurrentGemma": lambda: hf.RecurrentGemmaConfig(
        **SIZE, num_attention_heads=4, intermediate_size=64, lru_width=32, block_types=["recurrent", "attention"],
        attention_window_size=128,
    ),
    "xLSTM": lambda: hf.xLSTMConfig(**SIZE | {"hidden_size": 128}, num_heads=4, chunk_size=16, mode="inference", eps=1e-12),
}  # fmt: skip


def linear_model(name: str, config: Any = None, **changes: Any):
    """The family's model with random weights, large enough that all layers count, in evaluation mode. changes: of its config."""
    torch.manual_seed(0)
    config = FAMILIES[name]() if config is None else config
    for key, value in changes.items():
        setattr(config, key, value)
    make = hf.AutoModel if name == "GLM-5-next" else hf.AutoModelForCausalLM  # whose head is that of its images
    model = make.from_config(config).eval()
    with torch.no_grad():
        for path, x in model.named_parameters():
            if path.endswith("A_log"):  # mild decays, or nothing would be left of the tokens before
                x.uniform_(-3, -0.5)
            elif x.ndim > 1 and x.std() < 0.03:  # transformers' 0.02 would leave little but the residual stream
                x.mul_(5)
    return model


KEPT = {"Inkling 2"} if ONE_NAME else set()  # whose layers are others in this version of transformers
for name in KEPT:
    del FAMILIES[name]


def nightly_but(names, families=FAMILIES):
    """Parameters of all families: those of these names run at each commit, the others each night."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in families]


TOKENS = torch.randint(3, 99, (2, 70), generator=torch.Generator().manual_seed(1))
PADDED = 9  # how many tokens of the second row are padding


def forward(model, ids, cache=None, positions=None, **options):
    """One call with a cache: the first output, and the cache."""
    if cache is None and model.config.model_type == "recurrent_gemma":  # which returns none
        cache = hf.DynamicCache(config=model.config)
    if "position_ids" in inspect.signature(model.forward).parameters:  # as generate() passes them
        options["position_ids"] = positions
    out = model(input_ids=ids, use_cache=True, **as_called(model.forward, cache), **options)
    held = cache_of(out)
    return out[0], cache if held is None else held


def whole(model, ids=TOKENS, **options):
    return model(input_ids=ids, use_cache=False, **options)[0]


def in_turns(model, turns, ids=TOKENS, positions=True):
    """The outputs of consecutive calls with one cache, of so many tokens each."""
    outputs, cache, start = [], None, 0
    for turn in turns:
        places = torch.arange(start, start + turn).expand(2, -1) if positions else None
        out, cache = forward(model, ids[:, start : start + turn], cache, places)
        outputs.append(out)
        start += turn
    return torch.cat(outputs, dim=1)


def left_padded(model):
    """The outputs at the real tokens of the second row, whose first tokens are padding."""
    mask = torch.ones_like(TOKENS)
    mask[1, :PADDED] = 0
    ids = torch.where(mask.bool(), TOKENS, 0)
    options = {}
    if model.config.model_type == "recurrent_gemma":  # its texts begin where positions are 0, which generate() passes
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **options)[0][1:, PADDED:]


def right_padded(model, more=3):
    """The same row with its padding behind it, and more tokens one by one after that."""
    t = TOKENS.shape[1] - PADDED - more
    mask = torch.ones(2, t + PADDED, dtype=torch.int64)
    mask[1, t:] = 0
    ids = torch.cat([TOKENS[:, PADDED : PADDED + t], TOKENS[:, :PADDED]], dim=1)
    ids = torch.where(mask.bool(), ids, 0)
    out, cache = forward(model, ids, attention_mask=mask)
    outputs = [out[1:, :t]]
    for i in range(more):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        token = TOKENS[:, PADDED + t + i, None]
        out, cache = forward(model, token, cache, torch.tensor([[t + PADDED + i], [t + i]]), attention_mask=mask)
        outputs.append(out[1:])
    return torch.cat(outputs, dim=1)


def with_gaps(model, gap, more=2):
    """The outputs at the real tokens of the second row, which goes on with a cache and has padding among its new tokens."""
    new, start = torch.tensor([[1] * 6, gap]), 30
    real = new[1].bool()
    texts = TOKENS[:, :start]
    out, cache = forward(model, texts, None, torch.arange(start).expand(2, -1))
    outputs, taken = [out[1:]], start + int(real.sum())
    ids = torch.zeros(2, 6, dtype=torch.int64)
    ids[0], ids[1, real] = TOKENS[0, start : start + 6], TOKENS[1, start:taken]
    mask = torch.cat([torch.ones(2, start, dtype=torch.int64), new], 1)
    out, cache = forward(model, ids, cache, (mask.cumsum(1) - 1)[:, start:], attention_mask=mask)
    outputs.append(out[1:, real])
    for i in range(more):
        mask = torch.cat([mask, mask.new_ones(2, 1)], dim=1)
        token = torch.stack([TOKENS[0, start + 6 + i], TOKENS[1, taken + i]])[:, None]
        out, cache = forward(model, token, cache, (mask.cumsum(1) - 1)[:, -1:], attention_mask=mask)
        outputs.append(out[1:])
    return torch.cat(outputs, dim=1)


# which of transformers' own ways gives other numbers than the whole row at once, and why
REFERENCE_IS_WRONG = {
    (name, "right"): "the state decays at padding behind a text, and the convolution's last inputs become zeros"
    for name in FAMILIES
}
REFERENCE_IS_WRONG["MiniMax", "continued"] = "the mask of several new tokens leaves out those in the cache"

for _name in ("Mamba", "Falcon-Mamba", "Jamba", "Zamba"):
    REFERENCE_IS_WRONG[_name, "continued"] = "the scan of several new tokens begins with an empty state"
REFERENCE_IS_WRONG["RecurrentGemma", "continued"] = "the convolution of several new tokens begins with zeros"
for _way in ("left", "right"):
    REFERENCE_IS_WRONG["xLSTM", _way] = "it takes no mask, and computes padding as if it were text"
# what a family can't be asked for, and why
WITHOUT = {
    ("Qwen4-exp", "packed"): "refused: its n-grams cross packed sequences",
    ("GLM-5-next", "packed"): "refused: its attention crosses packed sequences",
    ("Inkling", "packed"): "refused: its attention crosses packed sequences",
    ("Inkling 2", "packed"): "refused: its attention crosses packed sequences",
    ("Inkling", "right"): "its attention counts padding",
    ("Inkling 2", "right"): "its attention counts padding",
}
