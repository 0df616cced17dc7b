"""Attention along a graph's edges is softmax over neighbours, and what PyTorch Geometric computes."""

import pytest
import torch
from torch.nn.functional import leaky_relu

from experiments.rivals.graph import GraphAttention

EDGES = [(0, 1), (1, 2), (4, 2), (4, 0), (3, 3), (1, 0), (5, 8)]  # one twice, one to itself, one out of the sequence


def layer_of(edges=EDGES):
    torch.manual_seed(0)
    return GraphAttention(12, 3, causal=False, edges=edges).double()


def neighbours(t, edges=EDGES):
    seen = torch.eye(t, dtype=torch.bool)
    for i, j in edges:
        if max(i, j) < t:
            seen[i, j] = seen[j, i] = True
    return seen


@pytest.mark.parametrize("masked", [False, True])
def test_it_is_softmax_over_neighbours(masked):
    layer, x = layer_of(), torch.randn(2, 6, 12, dtype=torch.float64)
    real = (
        torch.tensor([[True] * 6, [True, False, True, True, True, False]])
        if masked
        else torch.ones(2, 6, dtype=torch.bool)
    )
    v = layer.heads(layer.v_proj(x), 3)
    scores = leaky_relu((v * layer.a).sum(-1)[..., None] + (v * layer.c).sum(-1)[..., None, :], 0.2)
    seen = neighbours(6) & real[:, None, None]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    expected = layer.o_proj((weights.nan_to_num() @ v).transpose(1, 2).flatten(2))
    y = layer(x, key_mask=real if masked else None)
    torch.testing.assert_close(y[real], expected[real])
    assert y[~real].eq(0).all()


def test_a_node_without_edges_sees_itself():
    layer, x = layer_of(edges=()), torch.randn(1, 4, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.o_proj(layer.v_proj(x)))


@torch.no_grad()
def test_it_agrees_with_pytorch_geometric():
    nn = pytest.importorskip("torch_geometric.nn")
    layer, x = layer_of(), torch.randn(6, 12, dtype=torch.float64)
    theirs = nn.GATConv(12, 4, heads=3, bias=False).double()
    theirs.lin.weight.copy_(layer.v_proj.weight)
    theirs.att_dst.copy_(layer.a.mT.reshape(1, 3, 4))
    theirs.att_src.copy_(layer.c.mT.reshape(1, 3, 4))
    target, source = (neighbours(6) & ~torch.eye(6, dtype=torch.bool)).nonzero().T
    torch.testing.assert_close(layer(x[None])[0], layer.o_proj(theirs(x, torch.stack([source, target]))))
