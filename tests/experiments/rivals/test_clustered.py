"""Clustered and improved clustered attention, against dense weights written from the paper's equations."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, pieces

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T = 19


@pytest.mark.parametrize("name", ["clustered", "improved clustered"])
def test_it_is_its_definition(name):
    layer, x = build(ROWS[name]), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    cluster = layer.cluster(q, real)
    weights = torch.zeros(2, 4, T, T, dtype=torch.float64)
    exact = (q @ k.mT / 5**0.5).exp()
    for row in range(2):
        for head in range(4):
            for i in range(T):
                members = cluster[row, head] == cluster[row, head, i]
                mean = (q[row, head, members].mean(0) @ k[row, head].T / 5**0.5).softmax(-1)
                if layer.top_keys:  # eq. 10: the exact weights of the best keys, scaled to what the cluster has there
                    best = mean.topk(3).indices
                    own = exact[row, head, i, best]
                    mean = mean.index_copy(0, best, own / own.sum() * mean[best].sum())
                weights[row, head, i] = mean
    torch.testing.assert_close(layer.attend(x, q, k, v, real), weights @ v, **CLOSE)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert len(cluster.unique()) > 2


def test_clusters_are_k_means_of_bits():
    """By words: signs, centres from queries at equal distances, majorities, nearest by Hamming distance."""
    layer, q = build(ROWS["clustered"], bits=7, rounds=3), inputs(1, 4, T, 5)
    found = layer.cluster(q, torch.ones(1, T, dtype=torch.bool))
    planes = layer.draw(7, 5)
    for head in range(4):
        bits = [[bool(q[0, head, i] @ plane > 0) for plane in planes] for i in range(T)]
        centres = [list(bits[c * T // 4]) for c in range(4)]

        def nearest(own, centres=centres):
            distances = [sum(a != b for a, b in zip(own, centre)) for centre in centres]
            return distances.index(min(distances))

        cluster = [nearest(own) for own in bits]
        for _ in range(3):
            for c in range(4):
                members = [own for own, number in zip(bits, cluster) if number == c]
                for bit in range(7):
                    ones = sum(own[bit] for own in members)
                    if 2 * ones != len(members):
                        centres[c][bit] = 2 * ones > len(members)
            cluster = [nearest(own) for own in bits]
        assert found[0, head].tolist() == cluster


def test_with_as_many_keys_as_there_are_it_is_softmax():
    layer, x = build(ROWS["improved clustered"], top_keys=T), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), (q @ k.mT / 5**0.5).softmax(-1) @ v, **CLOSE)
