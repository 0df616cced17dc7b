"""Trained softmax models, and the queries, keys and values of their layers: what random features meet in earnest."""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel


class Layer(NamedTuple):
    """What one layer's attention was given: (b, h, t, d), (b, g, t, d), (b, g, t, d)."""

    q: Tensor
    k: Tensor
    v: Tensor


@torch.no_grad()
def layers_of(model: "PreTrainedModel", ids: Tensor) -> list[Layer]:
    """q, k and v of each layer of a model of transformers for ids (b, t), rotary positions applied."""
    from transformers import AttentionInterface

    layers: list[Layer] = []

    def record(module, query, key, value, attention_mask, **options):
        layers.append(Layer(query, key, value))
        o = scaled_dot_product_attention(query, key, value, is_causal=module.is_causal, enable_gqa=True)
        return o.transpose(1, 2), None

    AttentionInterface.register("tarnn_record", record)
    model.set_attn_implementation("tarnn_record")
    model(input_ids=ids)
    return layers


def encoder_layers(folder: Path, texts: list[str]) -> tuple[list[Layer], Tensor]:
    """q, k, v of each layer of a Hugging Face encoder in `folder` (MiniLM …) for texts, and their mask (b, t)."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=256)
    mask = inputs["attention_mask"].bool()
    # one text at a time, so that nothing is padded
    lengths = mask.sum(-1).tolist()
    rows = [layers_of(model, row[None, :length]) for row, length in zip(inputs["input_ids"], lengths)]
    longest = mask.shape[1]
    padded = [
        Layer(*(torch.cat([pad(x, (0, 0, 0, longest - x.shape[2])) for x in parts]) for parts in zip(*of_rows)))
        for of_rows in zip(*rows)
    ]
    return padded, mask


def stories_model(path: Path) -> "LlamaForCausalLM":
    """stories260K (Karpathy's tinyllamas) as a model of transformers, whose rotary pairs are halves, not neighbours.

    `path`: stories260K.bin of llama2.c: seven int32, then float32 arrays.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    raw = path.read_bytes()
    width, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", raw[:28])
    d = width // heads
    shapes = {
        "embedding": (vocab, width),
        "attn_norm": (layers, width),
        "wq": (layers, width, width),
        "wk": (layers, kv_heads * d, width),
        "wv": (layers, kv_heads * d, width),
        "wo": (layers, width, width),
        "ffn_norm": (layers, width),
        "w1": (layers, hidden, width),
        "w2": (layers, width, hidden),
        "w3": (layers, hidden, width),
        "norm": (width,),
        "cos and sin": (2, context, d // 2),
    }
    numbers = torch.frombuffer(bytearray(raw[28:]), dtype=torch.float32)
    parts = numbers.split([torch.Size(shape).numel() for shape in shapes.values()])
    w = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    order = torch.cat([torch.arange(0, d, 2), torch.arange(1, d, 2)])  # channels of a head, pairs apart
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.v_proj": "wv",
        "self_attn.o_proj": "wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "w1",
        "mlp.down_proj": "w2",
        "mlp.up_proj": "w3",
    }
    state = {"model.embed_tokens.weight": w["embedding"], "model.norm.weight": w["norm"]}
    for i in range(layers):
        state |= {f"model.layers.{i}.{new}.weight": w[old][i] for new, old in names.items()}
        for new, old in {"q_proj": "wq", "k_proj": "wk"}.items():
            turned = w[old][i].unflatten(0, (-1, d))[:, order].flatten(0, 1)
            state[f"model.layers.{i}.self_attn.{new}.weight"] = turned
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model


@torch.no_grad()
def own_stories(model: "LlamaForCausalLM", number: int, length: int) -> Tensor:
    """Stories that the model writes, (number, length) ids, drawn at temperature 1 from the beginning-of-story token."""
    torch.manual_seed(0)
    start = torch.ones(number, 1, dtype=torch.long)
    return model.generate(start, do_sample=True, top_k=0, max_new_tokens=length - 1, eos_token_id=None, pad_token_id=0)
