"""Small RWKV models whose weights are all random, in float64."""

import torch

from tarnn.attention.rwkv5 import Rwkv5TimeMixing
from tarnn.attention.rwkv7 import Rwkv7TimeMixing
from tarnn.models.rwkv import Rwkv5ChannelMixing, Rwkv7ChannelMixing, RwkvBlock, RwkvModel

HIDDEN, HEADS, VOCABULARY = 12, 3, 19
RANKS = {"w": 4, "a": 3, "g": 5, "v": 2}


def model_of(version: int) -> RwkvModel:
    """Make one of a version, 5 or 7."""
    torch.manual_seed(version)
    blocks = []
    for layer in range(3):
        if version == 7:
            ranks = RANKS if layer else {name: rank for name, rank in RANKS.items() if name != "v"}
            mixings = Rwkv7TimeMixing(HIDDEN, HEADS, ranks), Rwkv7ChannelMixing(HIDDEN, 20)
        else:
            mixings = Rwkv5TimeMixing(HIDDEN, HEADS), Rwkv5ChannelMixing(HIDDEN, 20)
        blocks.append(RwkvBlock(*mixings, HIDDEN, is_first=layer == 0))
    model = RwkvModel(blocks, HIDDEN, VOCABULARY).double()
    for name, x in model.named_parameters():
        if x.ndim == 1 or "time_" in name:
            torch.nn.init.uniform_(x, 0.1, 0.9)
        else:
            torch.nn.init.normal_(x, std=0.5)
    return model
