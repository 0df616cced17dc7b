"""Tokens through a whole model by one compiled kernel (csrc/model_step/layers.cpp).

All weights lie in one block of bytes (products.py). A plan, a list of numbers, says where each begins and what the model is made
of; csrc/model_step/plan.cpp reads it in the same order, and checks it. It begins with the version of its order, how many
numbers it has, and how many bytes the block has.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

VERSION = 7  # of a plan; csrc/model_step/plan.h has the same. Change both with the order or the meaning of its numbers
# as csrc/model_step/stack.h has them
ATTENTIONS = ("linear", "softmax", "none", "delta", "ssd", "rwkv7", "hybrid", "filters")
MLPS = ("none", "gelu", "swiglu", "squared_relu")
DECAYS = ("none", "head", "token", "channel")


def version_read() -> int:
    """The version of plans that the compiled kernels read; 0 where they know of none, or don't pack."""
    return torch.ops.tarnn_cpu.plan_version() if hasattr(torch.ops.tarnn_cpu, "pack") else 0


def run(
    ids: Tensor,
    positions: Tensor,
    plan: Tensor,
    weights: Tensor,
    tokens: Tensor,
    places: Tensor | None,
    extra: Tensor | None,
    states: Sequence[Tensor],
    lengths: Tensor,
    out: Tensor,
    limit: int,
    norm_eps: float,
    eps: float,
    scale: float,
    starts: Tensor | None = None,
    slots: Tensor | None = None,
    every: bool = False,
) -> None:
    """Read one token of each of b sequences, or several; `out` gets what the head puts out.

    ids (n,): the tokens of one sequence, then those of the next. starts (b + 1,): where each begins, and n; None: one token
    each. out, float32: (b, outputs), of the last token of each sequence that has one; every: (n, outputs), of all.
    What enters the first layer is tokens[id]·scale + places[position] + extra[row], in float32; beyond the last place, that one
    counts. tokens: one of `STORED`, (vocabulary, hidden or fewer channels, behind which zeros come).
    states: of each layer in turn S (b, g, f, d), z (b, g, f) and, if it has one, M (b, g); or keys and values
    (b, g, capacity, d) and, if it has one, their mask (b, capacity), to which lengths, int64, has two numbers: how many
    keys are there, and whether there is a mask; or of hybrid attention, for each of its `REACHES`, k, v, S, z, M and count of a
    `HybridState`, or such a cache; or −1 and 0, where each sequence has keys and values (1, g, capacity, d) of
    its own, one sequence's after another's, as many as its position says. slots (n + 1,): where behind these keys each
    token's own goes, ascending in a sequence, and how many places there are; those that a sequence leaves free are masked.
    None: one behind the other, of each sequence equally many where there is a cache of all. Writes all states, and adds to
    positions (b,) how many tokens came; all contiguous, float32 and int64. RuntimeError, before anything is written, for a
    token that is not there, for a position of `limit` or beyond, for a cache without room, and for a plan that is of another
    version, cut short, too long or damaged.
    """
    torch.ops.tarnn_cpu.stack(
        ids,
        positions,
        plan,
        weights,
        tokens,
        places,
        extra,
        states,
        lengths,
        out,
        limit,
        norm_eps,
        eps,
        scale,
        starts,
        slots,
        every,
    )
    increment_version((positions, *states))  # so that autograd sees what was written
