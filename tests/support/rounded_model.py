"""A model that computes as the fused step with int8 or int4 weights says it does, in plain PyTorch."""

import copy

import torch
from torch import nn

from support.packed_weights import rounded, rounded_groups
from tarnn.program.packing import LARGE_HEAD


class RoundedLinear(nn.Module):
    """W rounded as `kind` says, and each row of x to bytes: W ≈ factor·whole, x ≈ step·level + least."""

    def __init__(self, linear, kind):
        super().__init__()
        weight, self.bias = linear.weight.detach(), linear.bias
        whole, factor = rounded(weight) if kind == "int8" else rounded_groups(weight)
        self.weight = (whole.double() * factor[..., None].double()).view(len(weight), -1)[:, : weight.shape[1]]

    def forward(self, x):
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        step = (most - least) / 255
        level = ((x - least) * torch.where(step > 0, 1 / step, 0.0)).round()
        y = (level.double() * step + least) @ self.weight.T
        return (y if self.bias is None else y + self.bias).float()


def rounded_model(model, kind):
    """The same model, with every matrix of its layers rounded but those of decays; a large head in int8, others in bfloat16."""
    made = copy.deepcopy(model)
    for layer in made.model.layers:
        for place, module in list(layer.named_modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.Linear) and not place.endswith("decay"):
                    setattr(module, name, RoundedLinear(child, kind))
    name = "lm_head" if hasattr(made, "lm_head") else "head"
    head = getattr(made, name)
    if len(head.weight) >= LARGE_HEAD:
        setattr(made, name, RoundedLinear(head, "int8"))
    else:
        head.weight = nn.Parameter(head.weight.detach().bfloat16().float())
    return made


def share_alike(model, step, batch, steps=3):
    """Of the rows of the batch, the part whose numbers are those of the rounded model, and the worst of the others.

    A number close to the middle between two levels may go to either, which then is seen in all of its row.
    """
    reference, ids = rounded_model(model, step.weights), torch.arange(steps * batch).view(steps, batch) % 97
    ours, theirs = model.new_state(batch), model.new_state(batch)
    for token in ids:
        got, ours = step(token, ours)
        expected, theirs = reference.step(token, theirs)
    error = (got - expected).abs().amax(-1) / expected.abs().max()
    return (error < 1e-5).float().mean().item(), error.max().item()
