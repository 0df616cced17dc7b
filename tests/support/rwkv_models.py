"""Small RWKV models whose weights are all random, and folders of them with the names of rwkv.cpp or of fla."""

import json

import torch
from safetensors.torch import save_file

from support.open_folders import byte_level
from tarnn.attention.rwkv7 import Rwkv7TimeMixing
from tarnn.models.rwkv import Rwkv7ChannelMixing, RwkvBlock, RwkvModel

HIDDEN, HEADS, VOCABULARY = 12, 3, 19
RANKS = {"w": 4, "a": 3, "g": 5, "v": 2}
FLA = {  # config.json of a released model, narrower
    "a_low_rank_dim": RANKS["a"], "architectures": ["RWKV7ForCausalLM"], "attn": None, "attn_mode": "chunk",
    "auto_map": {"AutoModelForCausalLM": "modeling_rwkv7.RWKV7ForCausalLM"}, "bos_token_id": 1,
    "decay_low_rank_dim": RANKS["w"], "eos_token_id": 2, "fuse_cross_entropy": True, "fuse_norm": True,
    "gate_low_rank_dim": RANKS["g"], "head_dim": HIDDEN // HEADS, "hidden_act": "sqrelu", "hidden_ratio": 4.0,
    "hidden_size": HIDDEN, "initializer_range": 0.006, "intermediate_size": 20, "max_position_embeddings": 2048,
    "model_type": "rwkv7", "norm_bias": True, "norm_eps": 64e-5 * HEADS / HIDDEN, "norm_first": True, "num_heads": 32,
    "num_hidden_layers": 3, "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.48.3",
    "use_cache": True, "v_low_rank_dim": RANKS["v"], "value_dim": [HIDDEN] * 3, "vocab_size": VOCABULARY,
}  # fmt: skip
LORA = {"1": "0.weight", "2": "2.weight", "0": "2.bias"}
NAMES = {  # ours → fla's
    "emb.": "model.embeddings.", "ln_out.": "model.norm.", "head.": "lm_head.", "blocks.": "model.layers.",
    ".ln0.": ".pre_norm.", ".ln1.": ".attn_norm.", ".ln2.": ".ffn_norm.", ".att.ln_x.": ".attn.g_norm.", ".att.": ".attn.",
    ".receptance.": ".r_proj.", ".attn.key.": ".attn.k_proj.", ".attn.value.": ".attn.v_proj.", ".output.": ".o_proj.",
    **{f".attn.{x}{i}": f".attn.{x}_lora.lora.{LORA[i]}" for x in "wagv" for i in LORA},
}  # fmt: skip


def rwkv_model(vocabulary: int = VOCABULARY) -> RwkvModel:
    """Make a model of three layers, in float64."""
    torch.manual_seed(7)
    blocks = []
    for layer in range(3):
        ranks = RANKS if layer else {name: rank for name, rank in RANKS.items() if name != "v"}
        mixings = Rwkv7TimeMixing(HIDDEN, HEADS, ranks), Rwkv7ChannelMixing(HIDDEN, 20)
        blocks.append(RwkvBlock(*mixings, HIDDEN, is_first=layer == 0))
    model = RwkvModel(blocks, HIDDEN, vocabulary).double()
    for x in model.parameters():
        if x.ndim == 1:
            torch.nn.init.uniform_(x, 0.1, 0.9)
        else:
            torch.nn.init.normal_(x, std=0.5)
    return model


def fla_weights(model):
    """The model's weights under fla's names, in fla's shapes; its norms have one eps, so that of the model is set too."""
    found = {}
    for name, x in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        if name.endswith("x_rwkvag"):
            found |= {name.replace("x_rwkvag", f"x_{y}"): x[i][None] for i, y in enumerate("rwkvag")}
        else:
            found[name] = x.flatten() if x.ndim == 3 else x
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = FLA["norm_eps"]
    return found


def save_rwkv(folder, names: str):
    """Save a model of 264 tokens with a tokenizer of bytes. names: "rwkv.cpp" or "fla"."""
    model, ends = rwkv_model(264), {"bos_token_id": 256, "eos_token_id": 257, "vocab_size": 264}
    weights = model.state_dict() if names == "rwkv.cpp" else fla_weights(model)
    config = {"model_type": "rwkv7", "eos_token_id": 257} if names == "rwkv.cpp" else FLA | ends
    folder.mkdir(parents=True)
    save_file({name: x.float().contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    byte_level().save_pretrained(folder)
    return folder
