"""Small RWKV models whose weights are all random, in float64."""

import torch

from tarnn.attention.rwkv7 import Rwkv7TimeMixing
from tarnn.models.rwkv import Rwkv7ChannelMixing, RwkvBlock, RwkvModel

HIDDEN, HEADS, VOCABULARY = 12, 3, 19
RANKS = {"w": 4, "a": 3, "g": 5, "v": 2}


def rwkv_model() -> RwkvModel:
    """Make a model of three layers."""
    torch.manual_seed(7)
    blocks = []
    for layer in range(3):
        ranks = RANKS if layer else {name: rank for name, rank in RANKS.items() if name != "v"}
        mixings = Rwkv7TimeMixing(HIDDEN, HEADS, ranks), Rwkv7ChannelMixing(HIDDEN, 20)
        blocks.append(RwkvBlock(*mixings, HIDDEN, is_first=layer == 0))
    model = RwkvModel(blocks, HIDDEN, VOCABULARY).double()
    for x in model.parameters():
        if x.ndim == 1:
            torch.nn.init.uniform_(x, 0.1, 0.9)
        else:
            torch.nn.init.normal_(x, std=0.5)
    return model
