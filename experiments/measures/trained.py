"""Queries, keys and values of trained softmax models: what random features meet in earnest."""

import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class Layer(NamedTuple):
    """What one layer's attention was given: (b, h, t, d), (b, g, t, d), (b, g, t, d)."""

    q: Tensor
    k: Tensor
    v: Tensor


class Stories:
    """stories260K (Karpathy's tinyllamas): a Llama of 5 layers, 8 heads of 8, 4 key/value heads, 512 tokens.

    `path`: stories260K.bin of llama2.c: seven int32, then float32 arrays.
    """

    def __init__(self, path: Path):
        raw = path.read_bytes()
        width, hidden, layers, self.heads, self.kv_heads, vocab, context = struct.unpack("<7i", raw[:28])
        self.head_dim = width // self.heads
        shapes = {
            "embedding": (vocab, width),
            "attn_norm": (layers, width),
            "wq": (layers, width, width),
            "wk": (layers, self.kv_heads * self.head_dim, width),
            "wv": (layers, self.kv_heads * self.head_dim, width),
            "wo": (layers, width, width),
            "ffn_norm": (layers, width),
            "w1": (layers, hidden, width),
            "w2": (layers, width, hidden),
            "w3": (layers, hidden, width),
            "norm": (width,),
            "cos": (context, self.head_dim // 2),
            "sin": (context, self.head_dim // 2),
        }
        flat, at = torch.frombuffer(bytearray(raw[28:]), dtype=torch.float32), 0
        self.weights: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            size = torch.Size(shape).numel()
            self.weights[name] = flat[at : at + size].view(shape)
            at += size
        if at != len(flat):
            raise ValueError(f"{path} should hold {at} numbers for its sizes; it holds {len(flat)}.")

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, list[Layer]]:
        """ids (b, t) → logits (b, t, vocab), and each layer's q, k, v, rotary positions applied."""
        w, layers = self.weights, []
        x = w["embedding"][ids]
        for i in range(len(w["wq"])):
            h = rms_norm(x, x.shape[-1:], w["attn_norm"][i], 1e-5)
            q, k, v = (
                (h @ w[name][i].T).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for name in ("wq", "wk", "wv")
            )
            layers.append(Layer(self._turned(q), self._turned(k), v))
            o = scaled_dot_product_attention(*layers[-1], is_causal=True, enable_gqa=True)
            x = x + o.transpose(1, 2).flatten(2) @ w["wo"][i].T
            h = rms_norm(x, x.shape[-1:], w["ffn_norm"][i], 1e-5)
            x = x + (silu(h @ w["w1"][i].T) * (h @ w["w3"][i].T)) @ w["w2"][i].T
        return rms_norm(x, x.shape[-1:], w["norm"], 1e-5) @ w["embedding"].T, layers

    def _turned(self, x: Tensor) -> Tensor:
        """Neighbouring channels as pairs, turned by their position."""
        t = x.shape[2]
        a, b = x[..., ::2], x[..., 1::2]
        cos, sin = self.weights["cos"][:t], self.weights["sin"][:t]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)

    @torch.no_grad()
    def write(self, num_stories: int, length: int, seed: int) -> Tensor:
        """Stories of its own, (num_stories, length) ids, drawn at temperature 1 from the beginning-of-story token."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.ones(num_stories, 1, dtype=torch.long)
        while ids.shape[1] < length:
            last = self(ids)[0][:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(last, 1, generator=generator)], dim=1)
        return ids


def encoder_layers(folder: Path, texts: list[str]) -> tuple[list[Layer], Tensor]:
    """q, k, v of each layer of a Hugging Face encoder in `folder` (MiniLM …) for texts, and their mask (b, t)."""
    from transformers import AttentionInterface, AutoModel, AutoTokenizer

    layers: list[Layer] = []

    def record(module, query, key, value, attention_mask, **options):
        layers.append(Layer(query, key, value))
        o = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        return o.transpose(1, 2), None

    AttentionInterface.register("tarnn_record", record)
    model = AutoModel.from_pretrained(
        folder, attn_implementation="tarnn_record", local_files_only=True, trust_remote_code=False
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=256)
    mask = inputs["attention_mask"].bool()
    with torch.no_grad():
        # no mask in the model: one text at a time, so that nothing is padded
        rows = []
        for row, length in zip(inputs["input_ids"], mask.sum(-1).tolist()):
            layers.clear()
            model(input_ids=row[None, :length])
            rows.append(list(layers))
    longest = mask.shape[1]
    padded = [
        Layer(*(torch.cat([_pad(row[i][j], longest) for row in rows]) for j in range(3))) for i in range(len(rows[0]))
    ]
    return padded, mask


def _pad(x: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, length - x.shape[2]))


def stories_model(path: Path) -> "LlamaForCausalLM":
    """stories260K as a model of transformers: rotary pairs are halves there, not neighbours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    story = Stories(path)
    w, d = story.weights, story.head_dim
    vocab, width = w["embedding"].shape
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=w["w1"].shape[1],
        num_hidden_layers=len(w["wq"]),
        num_attention_heads=story.heads,
        num_key_value_heads=story.kv_heads,
        max_position_embeddings=len(w["cos"]),
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
    for i in range(len(w["wq"])):
        state |= {f"model.layers.{i}.{new}.weight": w[old][i] for new, old in names.items()}
        for new, old in {"q_proj": "wq", "k_proj": "wk"}.items():
            turned = w[old][i].unflatten(0, (-1, d))[:, order].flatten(0, 1)
            state[f"model.layers.{i}.self_attn.{new}.weight"] = turned
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return model
