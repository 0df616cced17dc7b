"""The Compressive Transformer is a loop over segments with two memories; its compression learns by its own loss alone."""

from copy import deepcopy

import pytest
import torch
from support.segments import attended, heads
from torch.nn.functional import avg_pool1d, scaled_dot_product_attention

from experiments.rivals.compressive import CompressiveTransformer


def layer_of(**options):
    torch.manual_seed(0)
    layer = CompressiveTransformer(12, 3, causal=True, qk_norm=True, **options).double()
    for bias in (layer.u, layer.w):
        torch.nn.init.normal_(bias)
    return layer


def by_segments(layer, x):
    """(outputs, the loss of the compression): algorithms 1 and 2 of the paper, segment after segment."""
    fixed = deepcopy(layer).requires_grad_(False)
    outputs, errors, memory, compressed = [], [], x[:, :0], x[:, :0]
    for segment in x.split(layer.segment, dim=1):
        outputs.append(attended(layer, segment, torch.cat([compressed, memory], 1)))
        memory = torch.cat([memory, segment.detach()], 1)
        gone, memory = memory[:, : -layer.memory], memory[:, -layer.memory :]
        if gone.shape[1]:
            new = (layer.conv(gone.mT) if layer.conv else avg_pool1d(gone.mT, layer.rate)).mT
            q = heads(fixed, "q", segment.detach()).transpose(1, 2)
            answers = [
                scaled_dot_product_attention(q, *(heads(fixed, name, y).transpose(1, 2) for name in "kv"))
                for y in (gone, new)
            ]
            errors.append((answers[0] - answers[1]).square())
            compressed = torch.cat([compressed, new.detach()], 1)[:, -layer.compressed :]
    return torch.cat(outputs, 1), torch.cat(errors, 2).mean()


@pytest.mark.parametrize(
    "sizes",
    [
        {"segment": 4, "memory": 4, "compressed": 3, "rate": 2},
        {"segment": 3, "memory": 6, "compressed": 4, "rate": 3},
        {"segment": 4, "memory": 4, "compressed": 2, "rate": 4, "compression": "mean"},
    ],
)
def test_it_is_a_loop_with_two_memories_in_value_and_gradient(sizes):
    layer = layer_of(**sizes)
    x, weight = (torch.randn(2, 8 * sizes["segment"], 12, dtype=torch.float64) for _ in range(2))
    wanted = [x.requires_grad_(), *layer.parameters()]
    y, (expected, loss) = layer(x), by_segments(layer, x)
    torch.testing.assert_close(y, expected)
    gradients = torch.autograd.grad((y * weight).sum(), wanted)
    whole = (expected * weight).sum() + (loss if layer.conv else 0)
    torch.testing.assert_close(gradients, torch.autograd.grad(whole, wanted))


def test_the_compression_learns_to_answer_as_before():
    layer = layer_of(segment=4, memory=4, compressed=4, rate=2)
    optimizer = torch.optim.Adam(layer.conv.parameters(), 0.1)
    # what is there twice can be kept in half of the places
    x = torch.randn(4, 16, 12, dtype=torch.float64).repeat_interleave(2, 1)
    before = by_segments(layer, x)[1].item()
    for _ in range(20):
        optimizer.zero_grad()
        (0 * layer(x)).sum().backward()  # the task has nothing to say
        optimizer.step()
    assert by_segments(layer, x)[1].item() < before / 4


def test_what_it_refuses():
    with pytest.raises(
        ValueError, match="must be multiples of rate, and the memory must hold a segment; got segment = 4, memory = 2"
    ):
        layer_of(segment=4, memory=2, rate=2)
    with pytest.raises(ValueError, match="compression must be convolution, mean or max; got 'least'"):
        layer_of(compression="least")
