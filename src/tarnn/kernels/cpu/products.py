"""Weights packed for products: one block of bytes, and the numbers that say what lies where (csrc/products/matrix.h).

A product y = W x + bias has W in panels of 64 outputs:

float32             [panel][input][64]
bfloat16            [panel][input / 2][64][2], inputs padded with zeros to a multiple of 32
int8                [panel][input / 4][64][4], inputs padded to a multiple of 64, whole numbers from −127 to 127; a factor and
                    a sum per output
int4                [panel][input / 32], of each 64 factors (bfloat16) and [4][64][4] bytes of two whole numbers from −8 to 7,
                    and a sum per output

For int8 and int4 the kernel rounds each row of activations to bytes, x ≈ step·level + least, and multiplies whole numbers:
y = step·factor·Σ level·W + least·factor·Σ W + bias, of int4 for each 32 inputs. Sums of whole numbers are exact; what is
lost is the rounding of W and of x. For bfloat16 it rounds them to bfloat16 numbers, if the program says so and the processor
multiplies pairs of these (AVX512-BF16, AMX); sums are float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tarnn.large_pages import move_to_large_pages, take_large_pages

PANEL = 64
FORMATS = ("float32", "bfloat16", "int8", "int4")
WEIGHT_TYPES = {torch.float32, torch.bfloat16, torch.float16}  # types of the weights of a model, and of its embeddings
GROUP = 32  # inputs that share a factor, of int4
STEP = 64  # bytes of inputs of an output that go together
STEPS = {"bfloat16": 32, "int8": 64}  # inputs of which panels have a multiple
NOWHERE = -1


class Block:
    """A block of bytes in the making, and the plan, a list of numbers, that says what lies where.

    version: of the order of these numbers, which whoever reads them compares with its own.
    """

    def __init__(self, version: int) -> None:
        self._of_program = version
        self._numbers: list[int] = []
        self._parts: list[tuple[int, Tensor]] = []  # from which byte on
        # as the operator `pack` takes them
        self._matrices: list[tuple[Sequence[Tensor], bool, int, int, int, int]] = []
        self._places: dict[object, list[int]] = {}  # of matrices that are in, their numbers in the plan
        self._tensors: list[Tensor | None] = []  # of these, kept so that no other takes their place in memory
        self._size = 0

    @property
    def plan(self) -> list[int]:
        """The plan, with its header: version, how many numbers, bytes of the block."""
        return [self._of_program, 3 + len(self._numbers), self._num_bytes(), *self._numbers]

    def numbers(self, *values: int) -> None:
        self._numbers += [int(x) for x in values]

    def place(self, x: Tensor | None) -> None:
        """Put a tensor in, at a multiple of 64 bytes, and write where that is into the plan; None: nowhere."""
        start = self._room(0 if x is None else x.nbytes, x is not None)
        if x is not None:
            self._parts.append((start, x))

    def vector(self, x: Tensor | None) -> None:
        """Put in a float32 vector with zeros up to a whole panel."""
        self.place(None if x is None else padded(x.float(), PANEL))

    def heads(self, weight: Tensor, bias: Tensor | None, kind: str = "float32") -> None:
        """Put in a product for each of g heads, (g, m, inputs) and (g, m), float32 or bfloat16: each head begins a panel."""
        if bias is None:
            bias = weight.new_zeros(weight.shape[:2])
        self.matrix(padded(weight.mT, PANEL).mT.flatten(0, 1), padded(bias, PANEL).flatten(), kind)

    def matrix(self, weight: Tensor, bias: Tensor | None, kind: str) -> None:
        """Put in y = W x + bias, W (outputs, inputs), in one of `FORMATS`."""
        self.products([(weight, bias)], kind)

    def products(self, products: Sequence[tuple[Tensor, Tensor | None]], kind: str, *, in_turns: bool = False) -> None:
        """Put in several products of one input as one: one behind the other, or 64 outputs of each in turns (equally many).

        Products of the same tensors, kept alike, are there once.
        """
        weights = [w for w, _ in products]
        key = kind, in_turns, tuple(same_numbers(x) for pair in products for x in pair)
        if key in self._places:
            return self.numbers(*self._places[key])
        begin = len(self._numbers)
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
        self._tensors += [x for pair in products for x in pair]
        self._places[key] = self._numbers[begin:]

    def bytes(self) -> Tensor:
        """Return the block, uint8, in large pages where the system has them, and with room to read beyond its end."""
        block = torch.empty(self._num_bytes(), dtype=torch.uint8, device="cpu")
        in_large_pages = take_large_pages(block)
        for weights, in_turns, kind, *places in self._matrices:
            torch.ops.tarnn_cpu.pack(_packable(weights), in_turns, kind, block, *places)
        for start, x in self._parts:
            end = start + x.nbytes
            block[start:end].view(x.dtype).view(x.shape).copy_(x)
            block[end : end + -end % 64] = 0
        block[self._size :] = 0
        if not in_large_pages:
            move_to_large_pages(block)
        return block

    def _room(self, num_bytes: int, needed: bool = True) -> int:
        """Return where so many bytes begin, and write it into the plan."""
        start = self._size if needed else NOWHERE
        self._numbers.append(start)
        self._size += (num_bytes + -num_bytes % 64) * needed
        return start

    def _num_bytes(self) -> int:
        return self._size + PANEL * 4


def same_numbers(x: Tensor | None) -> object:
    """Return what is equal for views of the same numbers in memory."""
    return None if x is None else (x.data_ptr(), x.dtype, tuple(x.shape), x.stride())


def _packable(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return matrices as the operator `pack` reads them, all of one of `WEIGHT_TYPES` and with unbroken rows; else copies."""
    types = {w.dtype for w in weights}
    alike = len(types) == 1 and types <= WEIGHT_TYPES
    return [w if w.stride(1) == 1 else w.contiguous() for w in (weights if alike else [w.float() for w in weights])]


def _bytes_of_panel(kind: str, inputs: int) -> int:
    """Return the bytes of a panel, as csrc/products/matrix.h has it."""
    if kind in STEPS:
        return -(-inputs // STEPS[kind]) * STEP * PANEL
    if kind == "int4":
        return -(-inputs // GROUP) * (2 + GROUP // 2) * PANEL
    return inputs * PANEL * 4


def padded(x: Tensor, multiple: int) -> Tensor:
    """Pad the last axis with zeros up to a multiple; x itself where none are missing."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
