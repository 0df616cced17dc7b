"""What a validation batch costs a model: sums over its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sums(nats: Tensor, *counts: Tensor | float) -> Tensor:
    """(nats, *counts) as one tensor, float64 where the device has it."""
    import torch

    from tarnn.numerics import widest

    nats = nats.to(widest(nats.device))
    return torch.stack([nats, *(torch.as_tensor(x).to(nats) for x in counts)])


def scored(logits: Tensor, labels: Tensor) -> Tensor:
    """(nats, labels, labels, hits) over all labels that are not −100."""
    from torch.nn.functional import cross_entropy

    logits, labels = logits.float().flatten(0, -2), labels.flatten()
    nats, count = cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()
    return sums(nats, count, count, (logits.argmax(-1) == labels).sum())
