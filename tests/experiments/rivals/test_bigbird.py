"""BigBird, against a dense mask of its blocks, and transformers' layer with the same random blocks."""

import pytest
import torch
from support.rivals import ROWS, build, inputs, masked_softmax, pieces
from torch import nn
from transformers import BigBirdConfig, BigBirdModel
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def test_it_is_its_definition():
    layer, x, size = build(ROWS["bigbird"]), inputs(2, 23, 14), 2
    q, k, v, real = pieces(layer, x)
    which, valid = layer.blocks(12, torch.tensor([11, 11]))
    seen = torch.zeros(4, 23, 23, dtype=torch.bool)
    block = torch.arange(23) // size
    for head in range(4):
        for i in range(12):
            blocks = which[0, head, i][valid[0, head, i]]
            assert len(blocks.unique()) == len(blocks) == (min(3, 12) + 2 + 2 if 1 < i < 10 else len(blocks))
            assert {0, 11, *range(max(i - 1, 0), min(i + 2, 12))} <= set(blocks.tolist())
            seen[head] |= (block == i)[:, None] & torch.isin(block, blocks)
    seen |= ((block == 0) | (block == 11))[:, None]
    torch.testing.assert_close(layer.attend(x, q, k, v, real), masked_softmax(q, k, v, seen), **CLOSE)


def test_random_blocks_are_spread_evenly_and_differ():
    """Over many rows, each block that is not seen anyhow is drawn about equally often."""
    layer = build(ROWS["bigbird"])
    which, valid = layer.blocks(200, torch.tensor([199]))
    drawn = which[..., 5:][valid[..., 5:]]
    counts = torch.bincount(drawn, minlength=200)[2:198].double()
    assert drawn.numel() == 4 * 200 * 2
    assert 0.6 * counts.mean() < counts.var() < 1.5 * counts.mean()  # as of a Poisson distribution
    heads = which[0, :, 2:198, 5:]
    assert (heads[0] == heads[1]).double().mean() < 0.05


@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_where_there_are_few_blocks_all_are_seen(length):
    layer, x = build(ROWS["bigbird"]), inputs(1, length, 14)
    q, k, v, real = pieces(layer, x)
    everything = torch.ones(length, length, dtype=torch.bool)
    torch.testing.assert_close(layer.attend(x, q, k, v, real), masked_softmax(q, k, v, everything), **CLOSE)


def test_it_is_that_of_transformers(monkeypatch):
    """In training: theirs draws no random blocks in evaluation, but counts the first block so many times."""
    config = BigBirdConfig(hidden_size=20, num_attention_heads=4, block_size=4, num_random_blocks=2, use_bias=True)
    theirs = BigBirdBlockSparseAttention(config, seed=3).double().train()
    ours = build(ROWS["bigbird"], hidden_size=20, bias=True, block=4)
    for name in ("query", "key", "value"):
        getattr(ours, f"{name[0]}_proj").load_state_dict(getattr(theirs, name).state_dict())
    ours.o_proj, drawn = nn.Identity(), []
    draw = theirs._bigbird_block_rand_mask_with_head
    monkeypatch.setattr(
        theirs, "_bigbird_block_rand_mask_with_head", lambda **how: drawn.append(draw(**how)) or drawn[0]
    )
    x, real = inputs(2, 52, 20), torch.ones(2, 52)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(real, 4)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    y, _ = theirs(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)
    plan = torch.stack([torch.as_tensor(head) for head in drawn[0]]).long()  # (h, 11, 2)
    plan = torch.cat([torch.full((4, 1, 2), 13), plan, torch.full((4, 1, 2), 13)], dim=1)
    monkeypatch.setattr(ours, "random", lambda which, last, draw: plan[..., draw].expand(len(last), -1, -1))
    torch.testing.assert_close(ours(x), y, rtol=1e-9, atol=1e-9)


def test_the_decoder_is_refused():
    with pytest.raises(ValueError, match="BigBird is defined for encoders: pass causal=False"):
        build(ROWS["bigbird"], causal=True)
