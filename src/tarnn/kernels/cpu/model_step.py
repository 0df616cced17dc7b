"""Tokens through a whole model by one compiled kernel (csrc/model_step/layers.cpp): its weights packed, and the call.

All weights lie in one block of bytes. A plan, a list of numbers, says where each begins and what the model is made
of; csrc/model_step/plan.cpp reads it in the same order, and checks it. It begins with the version of its order, how many
numbers it has, and how many bytes the block has. A product y = W x + bias has W in panels of 64 outputs:

float32, bfloat16   [panel][input][64]
int8                [panel][input / 4][64][4], whole numbers from −127 to 127, a factor and a sum per output
int4                [panel][input / 32], of each 64 factors (bfloat16) and [4][64][4] bytes of two whole numbers from −8 to 7,
                    and a sum per output

For int8 and int4 the kernel rounds each row of activations to bytes, x ≈ step·level + least, and multiplies whole numbers:
y = step·factor·Σ level·W + least·factor·Σ W + bias, of int4 for each 32 inputs. Sums of whole numbers are exact; what is
lost is the rounding of W and of x.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tarnn.kernels.features import NAMES
from tarnn.large_pages import wants_large_pages

VERSION = 6  # of a plan; csrc/model_step/plan.h has the same. Change both with the order or the meaning of its numbers
PANEL = 64
FORMATS = ("float32", "bfloat16", "int8", "int4")
GROUP = 32  # inputs that share a factor, of int4
EXTREMES = (-8.0, -7.5, -7.0, -8.5, -9.0, 7.0)  # what the largest of a group may be, in units of its factor
NOWHERE = -1
# as csrc/model_step/stack.h has them
OTHERS = ("abs", "sigmoid", "gelu", "cos", "plain_exp", "waves", "halves", "dpfp", "pairs", "cosformer", "log_softmax")
FUNCTIONS = (*NAMES, *OTHERS)
ATTENTIONS = ("linear", "softmax", "none", "delta", "ssd", "rwkv7", "hybrid", "filters")
MLPS = ("none", "gelu", "swiglu", "squared_relu")
DECAYS = ("none", "head", "token", "channel")


class Block:
    """A block of bytes in the making, and the plan that says what lies where."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._parts: list[tuple[int, Tensor]] = []  # from which byte on
        self._size = 0

    @property
    def plan(self) -> list[int]:
        """The plan, with its header: version, how many numbers, bytes of the block."""
        return [VERSION, 3 + len(self._numbers), self._num_bytes(), *self._numbers]

    def numbers(self, *values: int) -> None:
        self._numbers += [int(x) for x in values]

    def place(self, x: Tensor | None) -> None:
        """Puts a tensor in, at a multiple of 64 bytes, and where that is into the plan; None: nowhere."""
        if x is None:
            self._numbers.append(NOWHERE)
            return
        self._numbers.append(self._size)
        self._parts.append((self._size, x))
        self._size += x.nbytes + -x.nbytes % 64

    def vector(self, x: Tensor | None) -> None:
        """A float32 vector with zeros up to a whole panel."""
        self.place(None if x is None else padded(x.float(), PANEL))

    def heads(self, weight: Tensor, bias: Tensor | None, kind: str = "float32") -> None:
        """A product for each of g heads, (g, m, inputs) and (g, m), float32 or bfloat16: each head begins a panel."""
        if bias is None:
            bias = weight.new_zeros(weight.shape[:2])
        self.matrix(padded(weight.mT, PANEL).mT.flatten(0, 1), padded(bias, PANEL).flatten(), kind)

    def matrix(self, weight: Tensor, bias: Tensor | None, kind: str) -> None:
        """y = W x + bias, W (outputs, inputs), in one of `FORMATS`."""
        outputs, inputs = weight.shape
        self.numbers(FORMATS.index(kind), inputs, outputs)
        scale = sums = None
        if kind == "int8":
            whole, scale = rounded(weight.float())
            sums = whole.float().sum(-1) * scale
            self.place(panels(whole, group=4))
        elif kind == "int4":
            groups, factors = rounded_groups(weight.float())
            sums = (groups.sum(-1) * factors.float()).sum(-1)
            self.place(packed_groups(groups, factors))
        else:
            self.place(panels(weight.to(torch.bfloat16 if kind == "bfloat16" else torch.float32), group=1))
        self.vector(weight.new_zeros(outputs) if bias is None else bias)
        self.vector(scale)
        self.vector(sums)

    def bytes(self) -> Tensor:
        """The block, uint8, in large pages where the system has them, and with room to read beyond its end."""
        block = torch.empty(self._num_bytes(), dtype=torch.uint8, device="cpu")
        if wants_large_pages():
            torch.ops.tarnn_cpu.large_pages(block)
        for start, x in self._parts:  # laid out here, so that no copy of it is made elsewhere
            end = start + x.nbytes
            block[start:end].view(x.dtype).view(x.shape).copy_(x)
            block[end : end + -end % 64] = 0
        block[self._size :] = 0
        return block

    def _num_bytes(self) -> int:
        return self._size + PANEL * 4


def version_read() -> int:
    """The version of plans that the compiled kernels read; 0 where they know of none."""
    return torch.ops.tarnn_cpu.plan_version() if hasattr(torch.ops.tarnn_cpu, "plan_version") else 0


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
        better = error < best
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


def panels(weight: Tensor, group: int) -> Tensor:
    """(outputs, inputs) as [panel][input / group][64][group], zeros for what is missing."""
    weight = padded(padded(weight, group).mT, PANEL).mT
    return weight.view(len(weight) // PANEL, PANEL, -1, group).transpose(1, 2)


def padded(x: Tensor, multiple: int) -> Tensor:
    """The last axis with zeros up to a multiple; x itself where none are missing."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


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
    starts: Tensor | None = None,
    slots: Tensor | None = None,
    every: bool = False,
) -> None:
    """Read one token of each of b sequences, or several; `out` gets what the head puts out.

    ids (n,): the tokens of one sequence, then those of the next. starts (b + 1,): where each begins, and n; None: one token
    each. out, float32: (b, outputs), of the last token of each sequence that has one; every: (n, outputs), of all.
    What enters the first layer is tokens[id] + places[position] + extra[row]; beyond the last place, that one counts.
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
        starts,
        slots,
        every,
    )
    increment_version((positions, *states))  # so that autograd sees what was written
