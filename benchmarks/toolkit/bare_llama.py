"""Greedy generation by a Llama in plain PyTorch, as an expert writes it for speed: no library, one product for q, k and v,
one for both halves of the feed-forward, and a cache that is allocated once.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaForCausalLM


class BareLlama:
    """The weights of transformers' Llama, and a cache for `batch_size` texts of up to `capacity` tokens."""

    def __init__(self, model: LlamaForCausalLM, batch_size: int, capacity: int):
        config, self.model = model.config, model.model
        self.head, self.eps = model.lm_head.weight, config.rms_norm_eps
        self.heads, self.d = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.qkv, self.up = [], []
        for layer in self.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            self.qkv.append(torch.cat([x.weight for x in (attention.q_proj, attention.k_proj, attention.v_proj)]))
            self.up.append(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        self.cache = torch.zeros(2, len(self.qkv), batch_size, self.heads, capacity, self.d)
        cos, sin = self.model.rotary_emb(self.head, torch.arange(capacity)[None])
        self.cos, self.sin = cos[0], sin[0]

    def logits(self, ids: Tensor, position: int) -> Tensor:
        """Of what follows ids (b, t), which stand behind `position` others: (b, vocabulary)."""
        (b, t), end = ids.shape, position + ids.shape[1]
        x = embedding(ids, self.model.embed_tokens.weight)
        cos, sin = self.cos[position:end], self.sin[position:end]
        for i, layer in enumerate(self.model.layers):
            y = linear(rms_norm(x, x.shape[-1:], layer.input_layernorm.weight, self.eps), self.qkv[i])
            q, k, v = y.view(b, t, 3, self.heads, self.d).permute(2, 0, 3, 1, 4)
            keys, values = self.cache[0, i, :, :, :end], self.cache[1, i, :, :, :end]
            keys[:, :, position:] = rotated(k, cos, sin)
            values[:, :, position:] = v
            o = scaled_dot_product_attention(rotated(q, cos, sin), keys, values, is_causal=t > 1)
            x = x + linear(o.transpose(1, 2).reshape(b, t, -1), layer.self_attn.o_proj.weight)
            y = rms_norm(x, x.shape[-1:], layer.post_attention_layernorm.weight, self.eps)
            gate, up = linear(y, self.up[i]).chunk(2, -1)
            x = x + linear(silu(gate) * up, layer.mlp.down_proj.weight)
        return linear(rms_norm(x[:, -1], x.shape[-1:], self.model.norm.weight, self.eps), self.head)

    def generate(self, prompt: Tensor, tokens: int) -> Tensor:
        """The most likely tokens behind a prompt (b, t) → (b, tokens)."""
        ids, position, text = prompt, 0, []
        for _ in range(tokens):
            text.append(self.logits(ids, position).argmax(-1, keepdim=True))
            position, ids = position + ids.shape[1], text[-1]
        return torch.cat(text, 1)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
