"""The library on a device that isn't the CPU: `meta`, whose tensors have no data and refuse to meet tensors of the CPU.

So whatever is made on the wrong device shows, and whatever waits for a value of the device. On a GPU the tests of the op
(`tests/ops`) run themselves, and those of `test_on_a_gpu.py`.
"""

import copy

import pytest
import torch

from tarnn import feature_maps, linear_attention, step
from tarnn.models import TarnnConfig, TarnnForCausalLM

META = torch.device("meta")
MAPS = {
    "elu": feature_maps.Elu(),
    "exp": feature_maps.Exp(),
    "positive": feature_maps.PositiveRandomFeatures(8, 16, seed=0),
    "optimal": feature_maps.OptimalRandomFeatures(8, 16, seed=0),
    "dpfp": feature_maps.Dpfp(),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MAPS)
def test_attention_stays_on_the_device(name, causal):
    q, k, v = (torch.randn(2, 4, 20, 8, device=META, requires_grad=True) for _ in range(3))
    phi = copy.deepcopy(MAPS[name]).to(META)
    mask = torch.ones(2, 20, dtype=torch.bool, device=META)
    o, state = linear_attention(q, k, v, phi, causal=causal, key_mask=mask, return_state=True)
    assert o.device == state.S.device == state.z.device == META
    assert all(x.device == META for x in torch.autograd.grad(o.sum() + state.S.sum(), (q, k, v)))
    with torch.no_grad():
        o, state = step(q[:, :, :1], k[:, :, :1], v[:, :, :1], phi, state)
    assert o.device == state.S.device == META


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_language_model_stays_on_the_device(attention):
    config = TarnnConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, attention=attention)
    model = TarnnForCausalLM(config).to(META)
    tokens = torch.zeros(2, 9, dtype=torch.long, device=META)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert {x.grad.device for x in model.parameters() if x.grad is not None} == {META}
    with torch.no_grad():
        _, state = model.prefill(tokens, model.new_state(2, capacity=20))
        logits, state = model.step(tokens[:, 0], state)
    assert logits.device == META
    assert {x.device for x in state.tensors().values()} == {META}
