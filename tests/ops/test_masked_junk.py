"""Whatever stands at masked keys, NaN and infinity too, reaches no output and no gradient, whatever the map."""

import pytest
import torch
from torch import nn

from tarnn import feature_maps
from tarnn.feature_maps.base import PositionalMap
from tarnn.ops import linear_attention

D, NUM_HEADS = 8, 2
SIGNED = {"identity", "trigonometric", "gaussian", "generalized_gelu"}


class Own(nn.Module):
    """A user's map, which is no `FeatureMap`."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 12)

    def forward(self, x):
        return nn.functional.softplus(self.up(x))


def made(name: str) -> nn.Module:
    if name == "own":
        return Own()
    phi = feature_maps.make(name, head_dim=D, num_heads=NUM_HEADS, max_length=20)
    return phi.at(torch.arange(13)) if isinstance(phi, PositionalMap) else phi


def with_learned_draws(phi: nn.Module) -> list[torch.Tensor]:
    """The map's parameters; its ω made one too, so that the gradient of a projection counts."""
    for module in phi.modules():
        if "omega" in module._buffers:
            module._buffers["omega"] = module._buffers["omega"].clone().requires_grad_()
    return [x for x in (*phi.parameters(), *phi.buffers()) if x.requires_grad]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["own", "moved", *sorted(feature_maps.names())])
def test_junk_at_masked_keys_changes_nothing(name, junk, causal):
    """Output, gradients of q, k, v and of the map's parameters: as with zeros there, and zero at masked keys."""
    torch.manual_seed(0)
    if name == "moved":
        phi = feature_maps.Reparametrized(feature_maps.make("favor", head_dim=D, seed=0), num_heads=NUM_HEADS)
    else:
        phi = made(name)
    learned = with_learned_draws(phi)
    q, k, v = (torch.randn(2, h, 13, D) for h in (4, NUM_HEADS, NUM_HEADS))
    mask = torch.rand(2, 13) > 0.4
    grad = torch.randn(2, 4, 13, D)
    results = []
    for filler in (0.0, junk):
        k, v = (x.masked_fill(~mask[:, None, :, None], filler) for x in (k, v))
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = linear_attention(*inputs, phi, causal=causal, normalize=name not in SIGNED, key_mask=mask)
        results.append([o, *torch.autograd.grad(o, [*inputs, *learned], grad, allow_unused=True)])
    for x, y in zip(*results):
        assert (x is None) == (y is None)
        assert x is None or (y.isfinite().all() and torch.equal(x, y))
    assert all((x[~mask[:, None, :].expand(2, NUM_HEADS, 13)] == 0).all() for x in results[1][2:4])
