"""A plain Llama of transformers, described by a table of its classes, gives its own logits through the fused step."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.activations import SiLUActivation
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from tarnn.decoding.fused import FusedStep, refusal
from tarnn.kernels.cpu import library
from tarnn.models.state import ModelState
from tarnn.ops import KVCache

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels are not there")


def describe_llama(llama, plan):
    plan.add(llama.model)
    plan.head = plan.add(llama.lm_head)


def describe_backbone(model, plan):
    plan.tokens, plan.last_norm = plan.add(model.embed_tokens), plan.add(model.norm)
    plan.layers = [plan.add(layer, plan.add(model.rotary_emb)) for layer in model.layers]


def describe_layer(layer, plan, frequencies):
    attention = plan.add(layer.self_attn, frequencies)
    norms = plan.add(layer.input_layernorm), plan.add(layer.post_attention_layernorm)
    return plan.layer(norms[0], attention, norms[1], plan.add(layer.mlp))


def describe_attention(attention, plan, frequencies):
    d = attention.head_dim
    if attention.scaling != d**-0.5:
        raise plan.refusal(attention, "has another scale than 1/√d")
    inputs = tuple(map(plan.add, (attention.q_proj, attention.k_proj, attention.v_proj)))
    h, g = (len(x.weight) // d for x in inputs[:2])
    return plan.attention("softmax", (h, g, d), inputs, plan.add(attention.o_proj), frequencies=frequencies)


def describe_rotary(rotary, plan):
    if rotary.rope_type != "default" or rotary.attention_scaling != 1:
        raise plan.refusal(rotary, "scales positions")
    return rotary.inv_freq


def describe_mlp(mlp, plan):
    if type(mlp.act_fn) is not SiLUActivation:
        raise plan.refusal(mlp, "has another function than silu")
    return plan.feed_forward(plan.add(mlp.up_proj), plan.add(mlp.down_proj), plan.add(mlp.gate_proj))


LLAMA = {
    LlamaForCausalLM: describe_llama,
    LlamaModel: describe_backbone,
    LlamaDecoderLayer: describe_layer,
    LlamaAttention: describe_attention,
    LlamaRotaryEmbedding: describe_rotary,
    LlamaMLP: describe_mlp,
    LlamaRMSNorm: lambda norm, plan: plan.norm(norm.weight, eps=norm.variance_epsilon),
}


@pytest.fixture
def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "vocab_size": 71, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3, rope_theta=500.0)).eval()
    with torch.no_grad():
        for norm in (x for x in model.modules() if type(x) is LlamaRMSNorm):
            norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    return model


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_a_llama_gives_its_own_logits(llama, bias):
    """Token after token from an empty cache."""
    if bias:
        llama.model.layers[1].self_attn.k_proj.bias = torch.nn.Parameter(torch.randn(20))
    ids = torch.randint(71, (2, 40), generator=torch.Generator().manual_seed(1))
    step = FusedStep(llama, classes=LLAMA)
    state = ModelState(tuple(KVCache.empty(2, 2, 40, 10) for _ in range(3)), torch.zeros(2, dtype=torch.int64))
    logits = []
    for token in ids.T:
        out, state = step(token, state, inplace=True)
        logits.append(out)
    expected = llama(ids).logits
    assert expected.std() > 1
    torch.testing.assert_close(torch.stack(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_without_its_table_or_with_a_module_of_another_class_it_is_refused(llama):
    assert refusal(llama) == "it is made for whole models that describe themselves, not for LlamaForCausalLM"
    few = {kind: describe for kind, describe in LLAMA.items() if kind is not LlamaMLP}
    assert refusal(llama, few) == "model.layers.0.mlp (LlamaMLP) does not describe itself"
    llama.model.layers[1].mlp.act_fn = torch.nn.GELU()
    assert refusal(llama, LLAMA) == "model.layers.1.mlp (LlamaMLP) has another function than silu"
