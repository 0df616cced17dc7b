"""Hydra attention is its formula, and one line of linear attention."""

import pytest
import torch
from torch.nn.functional import normalize

import tarnn
from experiments.rivals.hydra import HydraAttention


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_hydra_is_its_formula(causal):
    layer, x = HydraAttention(12, 3, causal=causal).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    expected = torch.zeros_like(x)
    for i in range(7):
        for j in range(i + 1 if causal else 7):
            expected[:, i] += (
                q[:, i] / q[:, i].norm(dim=-1, keepdim=True) * k[:, j] / k[:, j].norm(dim=-1, keepdim=True) * v[:, j]
            )
    torch.testing.assert_close(layer(x), layer.o_proj(expected))
    q, k, v = (y.mT[..., None] for y in (normalize(q, dim=-1), normalize(k, dim=-1), v))  # (b, channels, t, 1)
    o = tarnn.linear_attention(q, k, v, tarnn.feature_maps.Identity(), causal=causal, normalize=False)
    torch.testing.assert_close(layer(x), layer.o_proj(o[..., 0].mT))
