"""Gated DeltaNet is its recurrence, token by token."""

import torch
from torch.nn.functional import conv1d, pad, silu

from experiments.rivals.gated_delta import GatedDeltaNet


@torch.no_grad()
def test_it_is_its_recurrence():
    layer, x = GatedDeltaNet(12, 3, causal=True).double(), torch.randn(2, 7, 12, dtype=torch.float64)
    made = []
    for projection, weight in zip((layer.q_proj, layer.k_proj, layer.v_proj), layer.conv):
        y = silu(conv1d(pad(projection(x).mT, (3, 0)), weight[:, None], groups=12))
        made.append(y.mT.unflatten(-1, (3, 4)))
    q, k, v = made
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta, decay = layer.beta_proj(x).sigmoid(), layer.decay(x).mT.exp()
    S, out = torch.zeros(2, 3, 4, 4, dtype=torch.float64), []
    for i in range(7):
        S = S * decay[:, i, :, None, None]
        error = v[:, i] - torch.einsum("bhde,bhd->bhe", S, k[:, i])
        S = S + beta[:, i, :, None, None] * k[:, i, :, :, None] * error[:, :, None]
        out.append(torch.einsum("bhde,bhd->bhe", S, q[:, i]) / 2)
    o = torch.stack(out, 1)
    o = layer.norm(o) * silu(layer.gate_proj(x)).unflatten(-1, (3, 4))
    torch.testing.assert_close(layer(x), layer.o_proj(o.flatten(2)))
