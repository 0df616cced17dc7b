"""The definition of `route` and `experts`, for all tokens at once; `definition` has the whole of it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tarnn.program.row_wise import FUNCTIONS, Call, Outputs


def route(call: Call, logits: Tensor) -> Outputs:
    logits, k = logits.flatten(1), int(call.number("k"))
    scores = logits.softmax(-1) if call.instruction.numbers["scores"] == "softmax" else logits.sigmoid()
    bias, groups = call.weight("bias"), int(call.number("groups"))
    choice = scores if bias is None else scores + bias
    if groups > 1:
        parts = choice.unflatten(1, (groups, -1))
        kept = best(parts.topk(2, -1).values.sum(-1), int(call.number("groups_kept")))
        choice = parts.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = best(choice, k).nonzero()[:, 1].view(len(logits), k)
    weights = scores.gather(1, chosen)
    if call.number("normalize"):
        weights = weights / (weights.sum(-1, keepdim=True) + call.number("eps"))
    return chosen.to(logits.dtype), weights * call.number("scale")


def best(x: Tensor, k: int) -> Tensor:
    """Mark the k largest numbers of each row, of equal ones the first."""
    order = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.zeros_like(x, dtype=torch.bool).scatter(1, order, True)


def experts(call: Call, x: Tensor, chosen: Tensor, weights: Tensor) -> Outputs:
    x, chosen, weights = x.flatten(1), chosen.flatten(1), weights.flatten(1)
    n, f = int(call.number("experts")), FUNCTIONS[str(call.instruction.numbers["function"])]
    numbers = chosen.nan_to_num(0.0).clamp(0, n - 1).long()
    y = x.new_zeros(len(x), call.instruction.outputs[0].size)
    for e in numbers.unique().tolist():
        rows, places = (numbers == e).nonzero(as_tuple=True)
        up, down = call.weights(f"up.{e}", f"down.{e}")
        gate = call.weight(f"gate.{e}")
        inner = F.linear(x[rows], up)
        inner = f(inner) if gate is None else f(F.linear(x[rows], gate)) * inner
        y.index_add_(0, rows, F.linear(inner, down) * weights[rows, places, None])
    return (y,)
