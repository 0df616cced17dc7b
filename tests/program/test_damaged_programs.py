"""A program is data that anybody may have written: the runtime refuses a damaged one before anything runs."""

import random

import pytest
import torch
from support.drawn_programs import MIXERS, VOCABULARY, drawn_program

from tarnn.kernels.cpu import library
from tarnn.program.packing import pack
from tarnn.program.runtime import Runtime
from tarnn.program.state import tensors_of

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")
TRIES = 220
ODD = (-1, 0, 1, 2, 3, 63, 64, 65, 2**31, 2**62, -(2**63))


def run(numbers, packed, program, weights):
    """Open and run a program whose numbers may be damaged. Raises RuntimeError where it is refused."""
    ops = torch.ops.tarnn_cpu
    handle = ops.program_open(numbers, packed.block, packed.tables)
    try:
        runtime = Runtime(program, weights)
        state = runtime.new_state(2, 6)
        ids, starts = torch.randint(VOCABULARY, (7,)), torch.tensor([0, 4, 7])
        out = torch.empty(7, program.num_outputs)
        ops.program_run(handle, ids, state.position, starts, tensors_of(state, program), None, True, out)
    finally:
        ops.program_close(handle)


@pytest.mark.parametrize("seed", range(len(MIXERS)))
def test_damaged_programs(seed):
    """One or two numbers changed: refused, or run within its memory (under sanitizers a read beyond it ends the process)."""
    chance = random.Random(seed)
    program, weights = drawn_program(seed), chance.choice(["float32", "int8", "int4"])
    packed = pack(program, weights)
    sentences = []
    for _ in range(TRIES):
        numbers = packed.numbers.clone()
        for _ in range(chance.randint(1, 2)):
            at = chance.randrange(len(numbers))
            numbers[at] = chance.choice([*ODD, int(numbers[at]) + chance.choice([-1, 1]), chance.randrange(200)])
        try:
            run(numbers, packed, program, weights)
        except RuntimeError as error:
            sentences.append(str(error).splitlines()[0])
    assert len(sentences) > TRIES // 3
    assert all(x.endswith(".") for x in sentences)


def test_what_is_cut_short_or_of_another_version():
    program = drawn_program(1)
    packed = pack(program, "float32")
    for count in (0, 1, 2, 3, 10, len(packed.numbers) - 1):
        with pytest.raises(RuntimeError, match="cut short"):
            run(packed.numbers[:count], packed, program, "float32")
    with pytest.raises(RuntimeError, match="too long"):
        run(torch.cat([packed.numbers, torch.tensor([0])]), packed, program, "float32")
    other = packed.numbers.clone()
    other[0] += 1
    with pytest.raises(RuntimeError, match="compile them again"):
        run(other, packed, program, "float32")
