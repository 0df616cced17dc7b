"""Whether a model is the same on all ranks."""

from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from tarnn.parallel.agreement import agree
from tarnn.parallel.group import Ranks


def check_alike(module: nn.Module, group: Any = None) -> None:
    """Raise UserError on every rank unless all have the same model: config, names, shapes and weights, to the bit.

    Weights that differ show in no shape, and would make outputs that belong to no model. It reads all weights once.
    """
    ranks = group if isinstance(group, Ranks) else Ranks(group)
    facts = {} if (config := getattr(module, "config", None)) is None else {"config": str(config)}
    agree(ranks, 0, facts | {name: _fingerprint(x) for name, x in module.state_dict().items()})


def _fingerprint(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(x.shape)} {x.dtype} #{blake2b(data, digest_size=4).hexdigest()}"
