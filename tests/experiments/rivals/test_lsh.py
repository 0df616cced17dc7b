"""LSH attention, against the union of its rounds as one dense mask, and transformers' Reformer."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, masked_softmax, past, pieces
from torch import nn
from torch.nn.functional import normalize
from transformers import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from experiments.rivals import lsh

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def union(bucket, chunk, causal):
    """Which keys each query sees in some round, from the buckets (b, h, r, t)."""
    b, h, rounds, t = bucket.shape
    seen = torch.zeros(b, h, t, t, dtype=torch.bool)
    for row in range(b):
        for head in range(h):
            for r in range(rounds):
                here = bucket[row, head, r].tolist()
                order = sorted(range(t), key=lambda i: (here[i], i))
                piece = {i: place // chunk for place, i in enumerate(order)}
                for i in range(t):
                    for j in range(t):
                        if here[i] == here[j] and piece[i] - piece[j] in (0, 1):
                            seen[row, head, i, j] = True
    seen &= ~torch.eye(t, dtype=torch.bool)
    if causal:
        seen &= past(t)
    return seen | (torch.eye(t, dtype=torch.bool) & ~seen.any(-1, keepdim=True))  # itself, where nothing else


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_it_is_its_definition(causal, rounds):
    """However often a pair meets, it counts once."""
    layer, x = build(ROWS["lsh"], causal, rounds=rounds), inputs(2, 19, 14)
    q, k, v, real = pieces(layer, x)
    seen = union(layer.buckets(q, real), 3, causal)
    expected = masked_softmax(q, normalize(k, dim=-1), v, seen, scale=1.0)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)
    assert not seen.all()


def test_buckets_are_pairs_of_the_nearest_of_random_directions():
    """Two buckets per chunk, a power of two; a shorter row has fewer; masked tokens come last."""
    layer = build(ROWS["lsh"], rounds=2)
    q, real = inputs(2, 4, 25, 5), torch.ones(2, 25, dtype=torch.bool)
    real[1, 13:] = False
    bucket = layer.buckets(q, real)  # 16 and 8 buckets
    directions = layer.draw(2, 2, 4, 2, 5)
    for row, (first, second) in enumerate([(4, 4), (2, 4)]):
        n = int(real[row].sum())
        ids = []
        for half, size in enumerate((first, second)):
            dots = torch.einsum("htd,chrd->hrtc", q[row, :, :n], directions[: size // 2, half])
            ids.append(torch.cat([dots, -dots], dim=-1).argmax(-1))
        expected = ids[0] * second + ids[1]
        same = expected[..., None] == expected[..., None, :]
        found = bucket[row, :, :, :n]
        assert torch.equal(found[..., None] == found[..., None, :], same)
        assert torch.equal(found.argsort(dim=-1, stable=True), expected.argsort(dim=-1, stable=True))
        assert len(expected.unique()) > first * second / 2
    assert (bucket[1, :, :, 13:] > bucket[1, :, :, :13].max()).all()


def test_it_is_that_of_transformers(monkeypatch):
    """But for what theirs leaves out, and what it adds: it sees other buckets in its chunks, counts a pair in each round, and its
    first chunk looks back at the last one of the round before."""
    config = ReformerConfig(
        hidden_size=20,
        num_attention_heads=4,
        attention_head_size=5,
        lsh_attn_chunk_length=4,
        num_hashes=3,
        num_buckets=[4, 4],
        hash_seed=7,
        is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs = LSHSelfAttention(config, layer_idx=0).double().eval()
    ours = build(ROWS["lsh"], hidden_size=20, chunk=4, rounds=3)
    ours.q_proj.load_state_dict(theirs.query_key.state_dict())
    ours.v_proj.load_state_dict(theirs.value.state_dict())
    ours.o_proj = nn.Identity()
    torch.manual_seed(7)
    rotations = torch.randn(4, 5, 3, 4, dtype=torch.float64).permute(3, 0, 2, 1)
    rotations = torch.stack([rotations[2:], rotations[:2]], dim=1)  # theirs has the less significant half first

    def look_back(y, fill=0):
        flat = y.flatten(2, 3)
        return torch.cat([flat.roll(1, dims=2), flat], dim=3).unflatten(2, y.shape[2:4])

    monkeypatch.setattr(lsh, "look_back", look_back)
    monkeypatch.setattr(ours, "draw", lambda *_: rotations)
    monkeypatch.setattr(ours, "visible", lambda *_: (torch.ones((), dtype=torch.bool), torch.ones(())))
    x = inputs(2, 32, 20)
    torch.testing.assert_close(ours(x), theirs(x).hidden_states, rtol=1e-4, atol=1e-5)  # norms its keys with 1e-6 more


def test_rotations_are_new_in_each_training_step():
    layer, x = build(ROWS["lsh"]), inputs(1, 40, 14)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
