"""Nyströmformer is its three products, softmax attention where there are landmarks enough, and what transformers has."""

import pytest
import torch
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from experiments.rivals.nystrom import NystromAttention
from tarnn import SoftmaxAttention

X = torch.randn(2, 11, 12, dtype=torch.float64)


@torch.no_grad()
def test_nystrom_is_its_three_products():
    layer = NystromAttention(12, 3, causal=False, landmarks=4, iterations=40, conv_kernel=3).double()
    q, k, v = (layer.heads(f(X), 3) for f in (layer.q_proj, layer.k_proj, layer.v_proj))
    cuts = [0, 3, 6, 9, 11]  # token i belongs to landmark 4 i // 11
    q_means, k_means = (torch.stack([y[:, :, a:b].mean(2) for a, b in zip(cuts, cuts[1:])], 2) for y in (q, k))
    weights = [(a @ b.mT / 2).softmax(-1) for a, b in ((q, k_means), (q_means, k_means), (q_means, k))]
    o = weights[0] @ torch.linalg.pinv(weights[1]) @ weights[2] @ v
    for h in range(3):
        for i in range(11):
            for j in range(3):
                if 0 <= i + j - 1 < 11:
                    o[:, h, i] += layer.conv[h, 0, j, 0] * v[:, h, i + j - 1]
    torch.testing.assert_close(layer(X), layer.merge(o, o.dtype))


@pytest.mark.parametrize("landmarks", [11, 16])
@torch.no_grad()
def test_with_a_landmark_for_each_token_it_is_softmax(landmarks):
    layer = NystromAttention(12, 3, causal=False, landmarks=landmarks, iterations=60, conv_kernel=0).double()
    softmax = SoftmaxAttention(12, 3, causal=False).double()
    softmax.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(X), softmax(X))


@torch.no_grad()
def test_nystrom_agrees_with_transformers():
    sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_landmarks": 4, "segment_means_seq_len": 16}
    config = NystromformerConfig(**sizes, conv_kernel_size=5, attention_probs_dropout_prob=0.0)
    theirs = NystromformerSelfAttention(config).double().eval()
    theirs.init_option = "exact"  # of each matrix; "original" divides by the largest sum of all rows and heads
    ours = NystromAttention(12, 3, causal=False, landmarks=4, conv_kernel=5, bias=True).double()
    for our, their in ((ours.q_proj, theirs.query), (ours.k_proj, theirs.key), (ours.v_proj, theirs.value)):
        our.load_state_dict(their.state_dict())
    ours.conv.copy_(theirs.conv.weight)
    x = torch.randn(2, 16, 12, dtype=torch.float64)
    torch.testing.assert_close(ours(x), ours.o_proj(theirs(x)[0]))
