"""The Routing Transformer's clusters, against words: loops over centres, tokens and seats."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, masked_softmax, past, pieces
from torch.nn.functional import layer_norm, normalize

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T = 19


def routed(layer, q, k, v):
    """The routed heads, row by row."""
    q = layer_norm(q, q.shape[-1:])
    k = q if layer.causal else layer_norm(k, k.shape[-1:])
    total, count = torch.zeros_like(v), torch.zeros_like(v[..., :1])
    seats = -(-T // layer.clusters)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            for centre in layer.centres[head]:
                i, j = (
                    sorted(range(T), key=lambda t: -float(normalize(y[row, head, t], dim=-1) @ centre))[:seats]
                    for y in (q, k)
                )
                logits = q[row, head, i] @ k[row, head, j].T / q.shape[-1] ** 0.5
                if layer.causal:
                    logits = logits.masked_fill(torch.tensor(j) > torch.tensor(i)[:, None], -torch.inf)
                total[row, head, i] += logits.softmax(-1) @ v[row, head, j]
                count[row, head, i] += 1
    return total / count.clamp(min=1)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_its_definition(causal):
    layer, x = build(ROWS["routing"], causal), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    near = (torch.arange(T)[:, None] - torch.arange(T)).abs() <= 3
    near = near & past(T) if causal else near
    expected = torch.cat(
        [masked_softmax(*(y[:, :2] for y in (q, k, v)), near), routed(layer, *(y[:, 2:] for y in (q, k, v)))], 1
    )
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)


def test_centres_follow_their_tokens_in_training_alone():
    layer, x = build(ROWS["routing"], average=0.5), inputs(2, T, 14)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, 12:] = False
    before = layer.centres.clone()
    layer(x, key_mask=mask)
    assert torch.equal(layer.centres, before)
    q, k, _ = layer.project(x, x)
    layer.train()(x, key_mask=mask)
    for head in range(2):
        tokens = torch.cat([normalize(layer_norm(y[:, 2 + head], y.shape[-1:]), dim=-1)[mask] for y in (q, k)])
        nearest = (tokens @ before[head].T).argmax(-1)
        for c in range(3):
            mean = normalize(tokens[nearest == c].sum(0), dim=-1)
            expected = (
                normalize(0.5 * before[head, c] + 0.5 * mean, dim=-1) if (nearest == c).any() else before[head, c]
            )
            torch.testing.assert_close(layer.centres[head, c], expected, **CLOSE)


@torch.no_grad()
def test_it_is_that_of_the_package():
    """routing-transformer 1.6.1, with normed inputs: it computes with queries and keys as they are."""
    package = pytest.importorskip("routing_transformer.routing_transformer")
    layer, x = build(ROWS["routing"], num_heads=1), inputs(2, 18, 14)
    theirs = package.KmeansAttention(3, 6, 1, 5).double().eval()
    theirs.kmeans.means.copy_(layer.centres)
    theirs.kmeans.initted.fill_(True)
    q, k, v, real = pieces(layer, x)
    y, _ = theirs(layer_norm(q, (5,)), layer_norm(k, (5,)), v)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), y, rtol=1e-5, atol=1e-6)
