"""The Sparse Transformer's two patterns, against dense masks written from the paper's sets."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, masked_softmax, past, pieces

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T, L, C = 19, 4, 2
I, J = torch.arange(T)[:, None], torch.arange(T)
PATTERNS = {
    "sparse, strided": ((I - J).abs() <= L, (I - J) % L == 0),
    "sparse, fixed": (I // L == J // L, (J % L >= L - C).expand(T, T)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_its_definition(name, causal):
    layer, x = build(ROWS[name], causal), inputs(2, T, 14)
    first, second = ((seen & past(T)) if causal else seen for seen in PATTERNS[name])
    seen = torch.stack([first, first, second, second])
    q, k, v, real = pieces(layer, x)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), masked_softmax(q, k, v, seen), **CLOSE)


def test_two_layers_reach_everything():
    """What the factorisation is for: a path of two steps from every token to every earlier one."""
    for first, second in PATTERNS.values():
        first, second = (first & past(T)).float(), (second & past(T)).float()
        reached = (first @ second + second @ first) > 0
        assert torch.equal(reached | (first > 0) | (second > 0), past(T))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_heads": 3}, "each for half of the heads; got 3 heads"), ({"summaries": 5}, "from 1 to stride = 4; got 5")],
)
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        build(ROWS["sparse, fixed"], **options)
