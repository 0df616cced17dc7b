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

VERSION = 7  # of a plan; csrc/model_step/plan.h has the same. Change both with the order or the meaning of its numbers
PANEL = 64
FORMATS = ("float32", "bfloat16", "int8", "int4")
STORED = {torch.float32, torch.bfloat16, torch.float16}  # types of the weights of a model, and of its embeddings
GROUP = 32  # inputs that share a factor, of int4
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
        self._matrices: list[
            tuple[Sequence[Tensor], bool, int, int, int, int]
        ] = []  # as the operator `pack` takes them
        self._size = 0

    @property
    def plan(self) -> list[int]:
        """The plan, with its header: version, how many numbers, bytes of the block."""
        return [VERSION, 3 + len(self._numbers), self._num_bytes(), *self._numbers]

    def numbers(self, *values: int) -> None:
        self._numbers += [int(x) for x in values]

    def place(self, x: Tensor | None) -> None:
        """Puts a tensor in, at a multiple of 64 bytes, and where that is into the plan; None: nowhere."""
        start = self._room(0 if x is None else x.nbytes, x is not None)
        if x is not None:
            self._parts.append((start, x))

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
        self.products([(weight, bias)], kind)

    def products(self, products: Sequence[tuple[Tensor, Tensor | None]], kind: str, *, in_turns: bool = False) -> None:
        """Several products of the same input as one: one behind the other, or 64 outputs of each in turns (equally many)."""
        weights = [w for w, _ in products]
        biases = [w.new_zeros(len(w)) if b is None else b for w, b in products]
        if in_turns:
            biases = [torch.stack([padded(b, PANEL).view(-1, PANEL) for b in biases], 1).flatten()]
        bias, inputs = torch.cat(biases), weights[0].shape[1]
        num_panels = -(-len(bias) // PANEL)
        self.numbers(FORMATS.index(kind), inputs, len(bias))
        start = self._room(num_panels * _bytes_of_panel(kind, inputs))
        self.vector(bias)
        scale = self._room(num_panels * PANEL * 4, kind == "int8")
        sums = self._room(num_panels * PANEL * 4, kind in ("int8", "int4"))
        self._matrices.append((weights, in_turns, FORMATS.index(kind), start, scale, sums))

    def bytes(self) -> Tensor:
        """The block, uint8, in large pages where the system has them, and with room to read beyond its end."""
        block = torch.empty(self._num_bytes(), dtype=torch.uint8, device="cpu")
        if wants_large_pages():
            torch.ops.tarnn_cpu.large_pages(block)
        for weights, in_turns, kind, *places in self._matrices:
            torch.ops.tarnn_cpu.pack(_packable(weights), in_turns, kind, block, *places)
        for start, x in self._parts:
            end = start + x.nbytes
            block[start:end].view(x.dtype).view(x.shape).copy_(x)
            block[end : end + -end % 64] = 0
        block[self._size :] = 0
        return block

    def _room(self, num_bytes: int, needed: bool = True) -> int:
        """Where so many bytes begin, which goes into the plan."""
        start = self._size if needed else NOWHERE
        self._numbers.append(start)
        self._size += (num_bytes + -num_bytes % 64) * needed
        return start

    def _num_bytes(self) -> int:
        return self._size + PANEL * 4


def version_read() -> int:
    """The version of plans that the compiled kernels read; 0 where they know of none, or don't pack."""
    return torch.ops.tarnn_cpu.plan_version() if hasattr(torch.ops.tarnn_cpu, "pack") else 0


def _packable(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices as the operator `pack` reads them, of one of the types `STORED` and with unbroken rows; else copies."""
    types = {w.dtype for w in weights}
    alike = len(types) == 1 and types <= STORED
    return [w if w.stride(1) == 1 else w.contiguous() for w in (weights if alike else [w.float() for w in weights])]


def _bytes_of_panel(kind: str, inputs: int) -> int:
    """As csrc/products/matrix.h has it."""
    if kind == "int8":
        return -(-inputs // 4) * 4 * PANEL
    if kind == "int4":
        return -(-inputs // GROUP) * (2 + GROUP // 2) * PANEL
    return inputs * PANEL * (2 if kind == "bfloat16" else 4)


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
