"""Weights as the fused step keeps them, and its products with bytes against plain arithmetic with the same rounding."""

import pytest
import torch
from support.rounded_model import share_alike

from tarnn.generation.fused import FusedStep
from tarnn.kernels.cpu.stack import PANEL, Block, panels, rounded
from tarnn.models import TarnnConfig, TarnnForCausalLM


@pytest.mark.parametrize("group", [1, 4])
def test_panels_hold_every_weight_once_and_zeros(group):
    outputs, inputs = 131, 30
    weight = torch.arange(1, outputs * inputs + 1).view(outputs, inputs)
    packed = panels(weight, group)
    assert packed.shape == (3, -(-inputs // group), PANEL, group)
    for o, i in ((0, 0), (63, 29), (64, 1), (130, 17)):
        assert packed[o // PANEL, i // group, o % PANEL, i % group] == weight[o, i]
    assert packed.count_nonzero() == weight.numel()


def test_rounded_weights_are_within_half_a_step():
    weight = torch.randn(5, 70) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 2.0])[:, None]
    whole, factor = rounded(weight)
    assert whole.dtype == torch.int8
    assert whole.abs().amax(-1).tolist() == [127, 127, 127, 0, 127]
    assert ((whole * factor[:, None] - weight).abs() <= factor[:, None] * 0.5001).all()


@pytest.mark.usefixtures("compiled")
def test_a_block_says_where_each_thing_begins():
    block = Block()
    block.numbers(True, 7)
    block.vector(torch.tensor([1.0, 2.0]))
    block.vector(None)
    block.matrix(torch.ones(3, 5), None, "int8")
    raw = block.bytes()
    _, seven, vector, nowhere, kind, inputs, outputs, at, bias, scale, sums = block.plan
    assert (seven, vector, nowhere, kind, inputs, outputs) == (7, 0, -1, 2, 5, 3)
    floats = raw.view(torch.float32)
    assert floats[:3].tolist() == [1, 2, 0]
    assert raw.view(torch.int8)[at : at + 4].tolist() == [127] * 4
    assert floats[bias // 4 : bias // 4 + 3].tolist() == [0, 0, 0]
    assert floats[scale // 4 : scale // 4 + 4].tolist() == pytest.approx([1 / 127] * 3 + [0])
    assert floats[sums // 4 : sums // 4 + 4].tolist() == pytest.approx([5, 5, 5, 0])
    assert all(place % 64 == 0 for place in (at, bias, scale, sums))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    "choices", [{}, {"norm_position": "post", "norm": "layer", "mlp": "gelu", "bias": True}]
)
def test_int8_is_the_model_with_rounded_weights_and_activations(choices):
    torch.manual_seed(0)
    model = TarnnForCausalLM(
        TarnnConfig(
            hidden_size=72, num_hidden_layers=1, num_attention_heads=3, initializer_range=0.2, **choices
        )
    ).eval()
    alike, worst = share_alike(model, FusedStep(model, "int8"), batch=60)
    assert alike > 0.6
    assert worst < 0.02
