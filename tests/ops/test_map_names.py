"""Maps given to the ops by name, and modules that are no feature maps."""

import pytest
import torch
from torch import nn

from tarnn.feature_maps import make, names
from tarnn.ops import linear_attention, step

SIGNED = {"identity", "trigonometric", "gaussian", "generalized_gelu"}
NOT_ALONE = {"clusters", "cosformer", "hedgehog"}  # one needs a length, two have parameters


@pytest.mark.parametrize("name", sorted(set(names()) - NOT_ALONE))
def test_a_name_is_the_map_with_its_default_options(name):
    q, k, v = (torch.randn(2, 4, 6, 5) for _ in range(3))
    seed = {"seed": 0} if "head_dim" in make(name, head_dim=5).inner.made_with() else {}
    phi, options = make(name, head_dim=5, **seed), {"normalize": name not in SIGNED}
    o, state = linear_attention(q, k, v, name, causal=True, return_state=True, **options)
    expected = linear_attention(q, k, v, phi, causal=True, **options)
    assert torch.equal(o, expected)
    again, _ = step(*(x[:, :, :1] for x in (q, k, v)), name, state, **options)
    other, _ = step(*(x[:, :, :1] for x in (q, k, v)), phi, state, **options)
    assert torch.equal(again, other)


@pytest.mark.compile
@pytest.mark.parametrize("given", ["favor", nn.Sequential(nn.Linear(5, 7), nn.Softplus())], ids=["name", "module"])
def test_names_and_modules_compile(given):
    torch._dynamo.reset()

    def attend(q, k, v):
        return linear_attention(q, k, v, given, causal=True)

    q, k, v = (torch.randn(2, 4, 6, 5) for _ in range(3))
    expected = attend(q, k, v)  # makes the map
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), expected)
