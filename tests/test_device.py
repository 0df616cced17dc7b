"""The library on a device that isn't the CPU: `meta`, whose tensors have no data and refuse to meet tensors of the CPU.

So whatever is made on the wrong device shows, and whatever waits for a value of the device.
"""

import copy

import pytest
import torch

from tarnn import feature_maps, linear_attention, models, step

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


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.long, device=META)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
IMAGES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_height": 3, "image_width": 4}


def language_model(**options):
    batch = {"input_ids": ones(2, 9), "labels": ones(2, 9)}
    return models.TarnnForCausalLM(models.TarnnConfig(**SIZES, **options)), batch


LEARNS = {  # a model, and a batch that it learns from
    "decoder": lambda: language_model(),
    "random features": lambda: language_model(feature_map="favor", decay="none"),
    "softmax": lambda: language_model(attention="softmax"),
    "masked": lambda: (
        models.TarnnForMaskedLM(models.TarnnConfig(**SIZES, causal=False, decay="none")),
        {"input_ids": ones(2, 9), "attention_mask": ones(2, 9), "labels": ones(2, 9)},
    ),
    "classes": lambda: (
        models.TarnnForSequenceClassification(models.TarnnConfig(**SIZES, causal=False, decay="none", pad_token_id=0)),
        {"input_ids": ones(2, 9), "attention_mask": ones(2, 9), "labels": ones(2)},
    ),
    "translation": lambda: (
        models.TarnnForConditionalGeneration(models.TarnnSeq2SeqConfig(**SIZES)),
        {"input_ids": ones(2, 9), "attention_mask": ones(2, 9), "labels": ones(2, 5)},
    ),
    "images": lambda: (
        models.TarnnForImageGeneration(models.TarnnImageConfig(**IMAGES, num_classes=3)),
        {"pixel_values": torch.ones(2, 3, 4, 1, dtype=torch.uint8, device=META), "class_labels": ones(2)},
    ),
}


@pytest.mark.parametrize("kind", LEARNS)
def test_a_model_learns_on_the_device(kind):
    """Built on the CPU, moved; forward, backward and a step of AdamW: nothing stays behind, and nothing is waited for."""
    model, batch = LEARNS[kind]()
    model.to(META)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=True)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    assert loss.device == META
    assert {x.grad.device for x in model.parameters() if x.grad is not None} == {META}


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_language_model_generates_on_the_device(attention):
    model = models.TarnnForCausalLM(models.TarnnConfig(**SIZES, attention=attention)).to(META)
    with torch.no_grad():
        _, state = model.prefill(ones(2, 9), model.new_state(2, capacity=20))
        logits, state = model.step(ones(2), state)
    assert logits.device == META
    assert {x.device for x in state.tensors().values()} == {META}
