"""Causal attention token by token (csrc/linear/streamed.h): a sequence has the bits of its steps, wherever it is divided."""

import pytest
import torch
from support.fuzz_calls import WIDEST, Call
from support.kernel_calls import MODES, drawn, same_bits

from tarnn.ops import LinearState, linear_attention, step

pytestmark = pytest.mark.usefixtures("compiled")

# with a maximum for each channel, plain PyTorch makes the units of sums: steps agree to rounding
CAUSAL = [mode for mode in MODES if drawn(mode).causal and mode != "decay a channel, weighted"]
# whole vectors and parts of one, two blocks and a part of one, an odd token at the end; one query head, two, three, and seven
SIZES = [
    {"d": 17, "e": 33, "t": 41, "r": 2, "dtype": "float32"},
    {"d": 64, "e": 64, "t": 131, "r": 1, "dtype": "float32"},
    {"d": 5, "e": 1, "t": 3, "r": 7, "dtype": WIDEST},
    {"d": 130, "e": 48, "t": 9, "r": 3, "dtype": "float16"},
]


class Sequence:
    """A call whose tokens can be given in parts, each from the state behind the part before."""

    def __init__(self, mode: str, **size):
        self.call = Call(drawn(mode, masked=False, junk="", seed=3, **size))
        self.length = self.call.drawn.t

    def part(self, begin: int, end: int, state: LinearState | None, attend=linear_attention, **how):
        q, k, v, *rest = (x if x.ndim < 3 else x[:, :, begin:end] for x in self.call.inputs)
        options = {"normalize": self.call.drawn.normalize} | dict(zip(self.call.names, rest))
        return attend(q, k, v, self.call.feature_map, state=state, **options, **how)

    def whole(self):
        return self.in_parts([0, self.length])

    def in_parts(self, cuts: list[int], state: LinearState | None = None):
        outputs = []
        for begin, end in zip(cuts, cuts[1:]):
            o, state = self.part(begin, end, state, causal=True, return_state=True)
            outputs.append(o)
        return [torch.cat(outputs, 2), state.S, state.z]

    def stepped(self):
        state, outputs = self.part(0, 0, None, causal=True, return_state=True)[1], []
        for i in range(self.length):
            o, state = self.part(i, i + 1, state, attend=step)
            outputs.append(o)
        return [torch.cat(outputs, 2), state.S, state.z]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "-".join(map(str, size.values())))
@pytest.mark.parametrize("mode", CAUSAL)
def test_a_sequence_has_the_bits_of_its_steps(mode, size):
    sequence = Sequence(mode, **size)
    assert same_bits(sequence.whole(), sequence.stepped())


@pytest.mark.parametrize("mode", CAUSAL)
def test_a_sequence_has_the_bits_of_its_parts(mode):
    sequence = Sequence(mode, **SIZES[1])
    assert same_bits(sequence.whole(), sequence.in_parts([0, 1, 38, 64, 64, 131]))


@pytest.mark.parametrize("mode", CAUSAL)
def test_a_prefix_has_the_bits_of_the_whole(mode):
    sequence = Sequence(mode, **SIZES[1])
    o, prefix = sequence.whole()[0], sequence.in_parts([0, 37])[0]
    assert same_bits([o[:, :, :37]], [prefix])
