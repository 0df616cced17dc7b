"""Laws of the definition over drawn programs: pieces equal the whole, a row equals itself alone, states are values."""

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from support.drawn_programs import VOCABULARY, drawn_program

from tarnn.program.definition import OF_TOKENS, new_states, run
from tarnn.program.recording import Recorder
from tarnn.program.recurrent import RECURRENT

SEEDS = st.integers(0, 10**6)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def whole(program, rows, **options):
    """Outputs and states of rows from the first token on, in float64."""
    states = new_states(program, len(rows), dtype=torch.float64)
    return run(program, rows, states, positions=[0] * len(rows), dtype=torch.float64, **options)


def ids(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in lengths]


def same(one, other):
    torch.testing.assert_close(one, other, **CLOSE)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_pieces_are_the_whole(seed, pieces):
    program, (tokens,) = drawn_program(seed), ids(sum(pieces))
    expected, (last,) = whole(program, [tokens])
    states, outputs, position = new_states(program, 1, dtype=torch.float64), [], 0
    for piece in tokens.split(pieces):
        (out,), states = run(program, [piece], states, positions=[position], dtype=torch.float64)
        outputs.append(out)
        position += len(piece)
    same(torch.cat(outputs), expected[0])
    same(states[0], last)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.lists(st.integers(1, 7), min_size=2, max_size=3))
def test_a_row_is_itself_alone(seed, lengths):
    program, rows = drawn_program(seed), ids(*lengths)
    outputs, states = whole(program, rows)
    for row, out, state in zip(rows, outputs, states, strict=True):
        (alone,), (last,) = whole(program, [row])
        same(out, alone)
        same(state, last)


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_states_are_values(seed):
    """Both continuations of one state are what they would be if the other had never been."""
    program, (start, left, right) = drawn_program(seed), ids(4, 3, 2)
    _, states = whole(program, [start])
    kept = [x.clone() for x in states[0]]
    for then in (left, right):
        (out,), _ = run(program, [then], states, positions=[4], dtype=torch.float64)
        same(out, whole(program, [torch.cat([start, then])])[0][0][4:])
        assert all(torch.equal(x, y) for x, y in zip(states[0], kept, strict=True))


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_the_future_is_not_seen(seed):
    program, (tokens,) = drawn_program(seed), ids(6)
    other = torch.cat([tokens[:4], (tokens[4:] + 1) % VOCABULARY])
    (one, two), _ = whole(program, [tokens, other])
    same(one[:4], two[:4])
    assert not torch.allclose(one[4:], two[4:])


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_float32_is_near_float64(seed):
    program, rows = drawn_program(seed), ids(6, 6)
    expected, _ = whole(program, torch.stack(rows))
    out, _ = run(program, torch.stack(rows), new_states(program, 2), positions=[0, 0])
    assert out.dtype == torch.float32
    assert expected.shape == (2, 6, VOCABULARY)
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=5e-3)


@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_any_device_and_type(seed):
    """Everything is computed where the ids are: a tensor elsewhere would be refused."""
    program = drawn_program(seed)
    looks = {"hybrid", "experts"}  # at how many tokens there were, and at which experts were chosen
    assume(all(x.kind not in looks for x in program.instructions))
    for device, dtype in (("meta", torch.float64), ("cpu", torch.bfloat16)):
        states = new_states(program, 2, dtype=dtype, device=device)
        rows = [x.to(device) for x in ids(3, 1)]
        outputs, states = run(program, rows, states, positions=[0, 5], dtype=dtype)
        tensors = [*outputs, *states[0], *states[1]]
        assert {(x.device.type, x.dtype) for x in tensors} == {(device, dtype)}
        assert [x.shape for x in outputs] == [(3, VOCABULARY), (1, VOCABULARY)]


def test_drawn_programs_hold_every_instruction():
    kinds = {x.kind for seed in range(60) for x in drawn_program(seed).instructions}
    assert kinds == {*RECURRENT, *OF_TOKENS}


def test_too_many_positions_are_refused():
    record = Recorder(limit=4)
    program = record.head(record.embed(torch.ones(VOCABULARY, 3)), torch.ones(2, 3))
    states = new_states(program, 1)
    with pytest.raises(ValueError, match="this program has 4 positions, and the tokens would end at 5"):
        run(program, ids(3), states, positions=[2])
    with pytest.raises(ValueError, match="got 1 rows, 1 states, 2 positions"):
        run(program, ids(3), states, positions=[0, 0])
