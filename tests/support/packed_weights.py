"""How the fused step rounds weights and lays them out, in plain PyTorch: the definition of csrc/products/packing.cpp."""

import torch
from torch import Tensor

from tarnn.kernels.cpu.products import GROUP, PANEL, padded

EXTREMES = (-8.0, -7.5, -7.0, -8.5, -9.0, 7.0)  # what the largest of a group may be, in units of its factor


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W (outputs, inputs) ≈ factor·whole: int8 from −127 to 127, and a factor per output."""
    scale = weight.abs().amax(-1) / 127
    per_scale = torch.where(scale > 0, 1 / scale, 0.0)
    return (weight * per_scale[:, None]).round().to(torch.int8), scale


def rounded_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W (outputs, inputs) ≈ factor·whole by groups of 32 inputs: whole numbers (outputs, groups, 32) from −8 to 7,
    float32, and factors (outputs, groups), bfloat16.

    The largest number of a group becomes each of `EXTREMES` in turn; of these, each group takes the one whose squared
    error is least.
    """
    groups = padded(weight, GROUP).unflatten(-1, (-1, GROUP))
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best = torch.full_like(largest, torch.inf)
    whole, factors = torch.zeros_like(groups), torch.zeros_like(largest)
    for extreme in EXTREMES:
        factor = (largest / extreme).bfloat16().float()
        near = (groups * torch.where(factor != 0, 1 / factor, 0.0)).round_().clamp_(-8, 7)
        error = (near * factor).sub_(groups).square_().sum(-1, keepdim=True)
        better = (error < best) & (factor != 0)
        best, factors = torch.where(better, error, best), torch.where(better, factor, factors)
        whole = torch.where(better, near, whole)
    return whole, factors.squeeze(-1).bfloat16()


def packed_groups(whole: Tensor, factors: Tensor) -> Tensor:
    """What `rounded_groups` found, as bytes [panel][group][128 of factors, 4 · 64 · 4 of weights]."""
    more = (0, 0, 0, 0, 0, -len(whole) % PANEL)
    whole = torch.nn.functional.pad(whole + 8, more, value=8.0).to(torch.uint8)
    low, high = whole.unflatten(0, (-1, PANEL)).unflatten(-1, (-1, 2, 4)).unbind(-2)  # [panel][64][group][4][4]
    weights = (low | high << 4).permute(0, 2, 3, 1, 4).flatten(2)
    factors = torch.nn.functional.pad(factors, more[2:]).unflatten(0, (-1, PANEL)).mT.contiguous()
    return torch.cat([factors.view(torch.uint8), weights], dim=-1)


def panels(weight: Tensor, group: int, multiple: int = 1) -> Tensor:
    """(outputs, inputs) as [panel][input / group][64][group]: whole panels, inputs to a multiple, zeros for what is missing."""
    weight = padded(padded(weight, max(group, multiple)).mT, PANEL).mT
    return weight.view(len(weight) // PANEL, PANEL, -1, group).transpose(1, 2)
