"""Each baseline is what its paper defines: dense masks, loops and formulas in float64."""

from copy import deepcopy

import pytest
import torch
from support.baselines import ROWS, build, inputs, masked_softmax, past, pieces
from support.segments import attended, heads
from torch.nn.functional import avg_pool1d, layer_norm, leaky_relu, normalize, scaled_dot_product_attention

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
T = 19
I, J = torch.arange(T)[:, None], torch.arange(T)
SIDES = pytest.mark.parametrize("causal", [False, True])


def strided(layer):
    near, far = (I - J).abs() <= 4, (I - J) % 4 == 0
    return torch.stack([near, near, far, far])


def fixed(layer):
    near, far = I // 4 == J // 4, (J % 4 >= 2).expand(T, T)
    return torch.stack([near, near, far, far])


def blocks_of_bigbird(layer):
    """Each block sees its neighbours, the first and the last, and two others, none twice; the first and the last see all."""
    which, valid = layer.blocks(10, torch.tensor([9, 9]))
    seen, block = torch.zeros(4, T, T, dtype=torch.bool), torch.arange(T) // 2
    for head in range(4):
        for i in range(10):
            blocks = which[0, head, i][valid[0, head, i]]
            assert {0, 9, *range(max(i - 1, 0), min(i + 2, 10))} <= set(blocks.tolist())
            assert len(blocks.unique()) == len(blocks)
            assert not 1 < i < 8 or len(blocks) == 7
            seen[head] |= (block == i)[:, None] & torch.isin(block, blocks)
    return seen | ((block == 0) | (block == 9))[:, None]


MASKS = {
    "window": lambda layer: ((I - J).abs() < 4) | (J < 2),
    "longformer, window alone": lambda layer: (I - J).abs() <= 4,
    "sparse, strided": strided,
    "sparse, fixed": fixed,
    "bigbird": blocks_of_bigbird,
}
MASKED = [(name, causal) for name in MASKS for causal in (False, True) if ROWS[name].causal or not causal]


@pytest.mark.parametrize(("name", "causal"), MASKED)
def test_softmax_over_the_keys_of_a_mask(name, causal):
    layer, x = build(ROWS[name], causal, num_kv_heads=4), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    seen = MASKS[name](layer) & (past(T) if causal else True)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), masked_softmax(q, k, v, seen), **CLOSE)


@SIDES
def test_global_tokens_of_longformer(causal):
    """They see all with projections of their own, and all see them."""
    layer, x = build(ROWS["longformer"], causal), inputs(2, T, 14)
    seen, everything = ((I - J).abs() <= 3) | (J < 2), torch.ones(T, T, dtype=torch.bool)
    seen, everything = (y & past(T) if causal else y for y in (seen, everything))
    q, k, v, real = pieces(layer, x)
    own = (layer.heads(p(x), 4) for p in (layer.global_q_proj, layer.global_k_proj, layer.global_v_proj))
    expected = torch.cat([masked_softmax(*own, everything)[:, :, :2], masked_softmax(q, k, v, seen)[:, :, 2:]], dim=2)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)


def union(bucket, chunk):
    """Which keys each query sees in some round, from the buckets (b, h, r, t): its own, in its chunk or the one before."""
    order = bucket.argsort(dim=-1, stable=True)
    piece = order.argsort(-1) // chunk
    step = piece[..., None] - piece[..., None, :]
    same = bucket[..., None] == bucket[..., None, :]
    return (same & ((step == 0) | (step == 1))).any(2)


@SIDES
@pytest.mark.parametrize("rounds", [1, 3])
def test_lsh(causal, rounds):
    """However often a pair meets, it counts once; a token sees itself only where it sees nothing else."""
    layer, x = build(ROWS["lsh"], causal, rounds=rounds), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    seen, itself = union(layer.buckets(q, real), 3) & ~(I == J), I == J
    seen = seen & past(T) if causal else seen
    seen = seen | (itself & ~seen.any(-1, keepdim=True))
    expected = masked_softmax(q, normalize(k, dim=-1), v, seen, scale=1.0)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)
    assert not seen.all()


def test_buckets_of_lsh_are_pairs_of_the_nearest_of_random_directions():
    """Two buckets per chunk, a power of two; a shorter row has fewer; masked tokens come last."""
    layer = build(ROWS["lsh"], rounds=2)
    q, real = inputs(2, 4, 25, 5), torch.ones(2, 25, dtype=torch.bool)
    real[1, 13:] = False
    bucket, directions = layer.buckets(q, real), layer.draw(2, 2, 4, 2, 5)
    for row, sizes in enumerate([(4, 4), (2, 4)]):
        n, ids = int(real[row].sum()), []
        for half, size in enumerate(sizes):
            dots = torch.einsum("htd,chrd->hrtc", q[row, :, :n], directions[: size // 2, half])
            ids.append(torch.cat([dots, -dots], dim=-1).argmax(-1))
        expected, found = ids[0] * sizes[1] + ids[1], bucket[row, :, :, :n]
        assert torch.equal(found[..., None] == found[..., None, :], expected[..., None] == expected[..., None, :])
        assert torch.equal(found.argsort(dim=-1, stable=True), expected.argsort(dim=-1, stable=True))
    assert (bucket[1, :, :, 13:] > bucket[1, :, :, :13].max()).all()


@pytest.mark.parametrize("name", ["clustered", "improved clustered"])
def test_clustered(name):
    layer, x = build(ROWS[name]), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    cluster = layer.cluster(q, real)
    weights = torch.zeros(2, 4, T, T, dtype=torch.float64)
    exact = (q @ k.mT / 5**0.5).exp()
    for row, head, i in torch.cartesian_prod(torch.arange(2), torch.arange(4), torch.arange(T)).tolist():
        members = cluster[row, head] == cluster[row, head, i]
        mean = (q[row, head, members].mean(0) @ k[row, head].T / 5**0.5).softmax(-1)
        if layer.top_keys:  # eq. 10: the exact weights of the best keys, scaled to what the cluster has there
            best = mean.topk(3).indices
            own = exact[row, head, i, best]
            mean = mean.index_copy(0, best, own / own.sum() * mean[best].sum())
        weights[row, head, i] = mean
    torch.testing.assert_close(layer.attend(x, q, k, v, real), weights @ v, **CLOSE)
    assert len(cluster.unique()) > 2


def test_clusters_are_those_of_the_queries():
    """Four directions with little noise are four clusters."""
    layer, kind = build(ROWS["clustered"], bits=31), torch.arange(20) % 4
    directions = inputs(1, 4, 4, 5)
    cluster = layer.cluster(
        directions[:, :, kind] + 1e-3 * inputs(1, 4, 20, 5, seed=2), torch.ones(1, 20, dtype=torch.bool)
    )
    assert torch.equal(cluster[..., None] == cluster[..., None, :], (kind[:, None] == kind).expand(1, 4, 20, 20))


def routed(layer, q, k, v):
    """The routed heads of the Routing Transformer, row by row: a centre takes its nearest queries and keys."""
    q = layer_norm(q, q.shape[-1:])
    k = q if layer.causal else layer_norm(k, k.shape[-1:])
    total, count, seats = torch.zeros_like(v), torch.zeros_like(v[..., :1]), -(-T // layer.clusters)
    for row in range(len(q)):
        for head in range(q.shape[1]):
            for centre in layer.centres[head]:
                i, j = ((normalize(y[row, head], dim=-1) @ centre).topk(seats).indices.sort().values for y in (q, k))
                logits = q[row, head, i] @ k[row, head, j].T / q.shape[-1] ** 0.5
                if layer.causal:
                    logits = logits.masked_fill(j > i[:, None], -torch.inf)
                total[row, head, i] += logits.softmax(-1) @ v[row, head, j]
                count[row, head, i] += 1
    return total / count.clamp(min=1)


@torch.no_grad()
@SIDES
def test_routing(causal):
    layer, x = build(ROWS["routing"], causal), inputs(2, T, 14)
    q, k, v, real = pieces(layer, x)
    near = ((I - J).abs() <= 3) & (past(T) if causal else True)
    local = masked_softmax(*(y[:, :2] for y in (q, k, v)), near)
    expected = torch.cat([local, routed(layer, *(y[:, 2:] for y in (q, k, v)))], 1)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)


def test_centres_of_routing_follow_their_tokens_in_training_alone():
    layer, x = build(ROWS["routing"], average=0.5), inputs(2, T, 14)
    before, (q, k, _) = layer.centres.clone(), layer.project(x, x)
    layer(x)
    assert torch.equal(layer.centres, before)
    layer.train()(x)
    for head in range(2):
        tokens = torch.cat([normalize(layer_norm(y[:, 2 + head], y.shape[-1:]), dim=-1).flatten(0, 1) for y in (q, k)])
        nearest = (tokens @ before[head].T).argmax(-1)
        for c in nearest.unique().tolist():
            mean = normalize(tokens[nearest == c].sum(0), dim=-1)
            expected = normalize(0.5 * before[head, c] + 0.5 * mean, dim=-1)
            torch.testing.assert_close(layer.centres[head, c], expected, **CLOSE)


def by_segments(layer, x):
    """(outputs, the loss of the compression) of Transformer-XL and the Compressive Transformer, segment after segment."""
    fixed = deepcopy(layer).requires_grad_(False)
    outputs, errors, memory, compressed = [], [torch.zeros(1, 1, 1)], x[:, :0], x[:, :0]
    for segment in x.split(layer.segment, dim=1):
        outputs.append(attended(layer, segment, torch.cat([compressed, memory], 1)))
        memory = torch.cat([memory, segment.detach()], 1)
        gone, memory = memory[:, : -layer.memory], memory[:, -layer.memory :]
        if gone.shape[1] and hasattr(layer, "rate"):
            new = (layer.conv(gone.mT) if layer.conv else avg_pool1d(gone.mT, layer.rate)).mT
            q = heads(fixed, "q", segment.detach()).transpose(1, 2)
            answers = [
                scaled_dot_product_attention(q, *(heads(fixed, name, y).transpose(1, 2) for name in "kv"))
                for y in (gone, new)
            ]
            errors.append((answers[0] - answers[1]).square())
            compressed = torch.cat([compressed, new.detach()], 1)[:, -layer.compressed :]
    return torch.cat(outputs, 1), torch.cat(errors[1:] or errors, 2).mean()


SEGMENTS = [
    ("transformer-xl", {"segment": 3, "memory": 7}),
    ("transformer-xl", {"segment": 5, "memory": 2}),
    ("transformer-xl", {"segment": 16, "memory": 4}),
    ("compressive", {"segment": 4, "memory": 4, "compressed": 3, "rate": 2, "qk_norm": True}),
    ("compressive", {"segment": 3, "memory": 6, "compressed": 4, "rate": 3}),
    ("compressive", {"segment": 4, "memory": 4, "compressed": 2, "rate": 4, "compression": "mean"}),
]


@pytest.mark.parametrize(("name", "sizes"), SEGMENTS)
def test_a_loop_over_segments_in_value_and_gradient(name, sizes):
    """The compression learns by its own loss alone, which adds itself in the backward pass."""
    layer = build(ROWS[name], True, hidden_size=12, num_heads=3, head_dim=4, **sizes)
    for bias in (layer.u, layer.w):
        torch.nn.init.normal_(bias)
    t = 14 if name == "transformer-xl" else 8 * sizes["segment"]
    x, weight = inputs(2, t, 12).requires_grad_(), inputs(2, t, 12, seed=2)
    wanted = [x, *layer.parameters()]
    y, (expected, loss) = layer(x), by_segments(layer, x)
    torch.testing.assert_close(y, expected)
    whole = (expected * weight).sum() + (loss if getattr(layer, "conv", None) else 0)
    gradients = (torch.autograd.grad(z, wanted) for z in ((y * weight).sum(), whole))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shared", ["none", "heads", "keys and values"])
@pytest.mark.parametrize("t", [20, 5])
def test_linformer(shared, t):
    layer, x = build(ROWS["linformer"], shared=shared), inputs(2, t, 14)
    q, k, v, real = pieces(layer, x)
    E, F = (y[:, :, :t] for y in (layer.E, layer.F))
    expected = (q @ (E @ k).mT / 5**0.5).softmax(-1) @ (F @ v)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), expected, **CLOSE)
    assert (layer.E is layer.F) == (shared == "keys and values")


@torch.no_grad()
def test_nystrom():
    layer, x = build(ROWS["nystrom"], iterations=40, conv_kernel=3), inputs(2, 11, 14)
    q, k, v, real = pieces(layer, x)
    cuts = [0, 3, 6, 9, 11]  # token i belongs to landmark 4 i // 11
    q_means, k_means = (torch.stack([y[:, :, a:b].mean(2) for a, b in zip(cuts, cuts[1:])], 2) for y in (q, k))
    weights = [(a @ b.mT / 5**0.5).softmax(-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))]
    o = weights[0] @ torch.linalg.pinv(weights[1]) @ weights[2] @ v
    for i, j in ((i, j) for i in range(11) for j in range(3) if 0 <= i + j - 1 < 11):
        o[:, :, i] += layer.conv[:, 0, j] * v[:, :, i + j - 1]
    torch.testing.assert_close(layer.attend(x, q, k, v, real), o, rtol=1e-6, atol=1e-8)


@torch.no_grad()
@SIDES
def test_hydra(causal):
    layer, x = build(ROWS["hydra"], causal, num_kv_heads=4), inputs(2, 7, 14)
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    sums = (normalize(k, dim=-1) * v).cumsum(1)
    expected = normalize(q, dim=-1) * (sums if causal else sums[:, -1:])
    torch.testing.assert_close(layer(x), layer.o_proj(expected), **CLOSE)


def test_graph_is_softmax_over_neighbours():
    # one twice, one to itself, one out of the sequence
    edges = [(0, 1), (1, 2), (4, 2), (4, 0), (3, 3), (1, 0), (5, 8)]
    layer, x = build(ROWS["graph"], edges=edges), inputs(2, 6, 14)
    real = torch.tensor([[True] * 6, [True, False, True, True, True, False]])
    v = layer.heads(layer.v_proj(x), 4)
    scores = leaky_relu((v * layer.a).sum(-1)[..., None] + (v * layer.c).sum(-1)[..., None, :], 0.2)
    seen = torch.eye(6, dtype=torch.bool)
    for i, j in edges[:-1]:
        seen[i, j] = seen[j, i] = True
    weights = scores.masked_fill(~(seen & real[:, None, None]), -torch.inf).softmax(-1)
    expected = layer.o_proj((weights.nan_to_num() @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, key_mask=real)[real], expected[real], **CLOSE)
