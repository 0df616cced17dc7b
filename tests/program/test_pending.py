"""Tokens read in one pass, of which only some stay: as if the others had never been read, to the bit."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.drawn_programs import VOCABULARY, drawn_program

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program.pending import MOST_ROWS
from tarnn.program.plain import PlainRuntime
from tarnn.program.runtime import Runtime

SEEDS = st.integers(0, 2**31)
COUNTS = st.tuples(*[st.integers(0, 5)] * 3)
compiled = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")


def check(runtime, seed, counts, drafted=5):
    """Two rounds of drafts in three rows behind a prompt, against steps of each row alone."""
    ids = torch.randint(VOCABULARY, (3, 30), generator=torch.Generator().manual_seed(seed))
    _, state = runtime.prefill(ids[:, :6], runtime.new_state(3, 24))
    taken = [6] * 3
    for round_of in (counts, counts[::-1]):
        part = torch.stack([x[n : n + drafted] for x, n in zip(ids, taken, strict=True)])
        pending = runtime.verify(part, state, inplace=True)
        logits = pending.logits
        state = pending.accept(round_of)
        for row, n in enumerate(taken):
            alone = steps(runtime, ids[row], n + drafted)[0]
            assert torch.equal(logits[row], torch.stack(alone[n:]))
        taken = [a + b for a, b in zip(taken, round_of, strict=True)]
        assert state.position.tolist() == taken
    after, _ = runtime(torch.tensor([1, 2, 3]), state)
    for row, n in enumerate(taken):
        one = steps(runtime, ids[row], n)[1]
        logits, one = runtime(torch.tensor([row + 1]), one)
        assert torch.equal(after[row], logits[0])


def steps(runtime, ids, n):
    """The logits after each of n tokens, and the state."""
    state, logits = runtime.new_state(1, 24), []
    for token in ids[:n]:
        out, state = runtime(token[None], state, inplace=True)
        logits.append(out[0])
    return logits, state


@compiled
@pytest.mark.parametrize("weights", FORMATS)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, counts=COUNTS)
def test_what_is_accepted_is_as_if_read_alone(weights, seed, counts):
    check(Runtime(drawn_program(seed), weights), seed, counts)


@compiled
def test_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for seed in range(12):
            check(Runtime(drawn_program(seed)), seed, (seed % 6, 5, 2))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, counts=COUNTS)
def test_the_definition_accepts_alike(seed, counts):
    """In plain PyTorch, where a pass is read again: the sums over several tokens are within rounding."""
    runtime, ids = PlainRuntime(drawn_program(seed)), torch.randint(VOCABULARY, (3, 6))
    state = runtime.new_state(3, 12)
    pending = runtime.verify(ids[:, :5], state)
    after = pending.accept(counts)
    for row, n in enumerate(counts):
        whole, _ = runtime.prefill(ids[row : row + 1, :5], runtime.new_state(1, 12), every=True)
        torch.testing.assert_close(pending.logits[row : row + 1], whole)
        part = torch.cat([ids[row, :n], ids[row, 5:]])[None]
        alone, _ = runtime.prefill(part, runtime.new_state(1, 12))
        torch.testing.assert_close(runtime(ids[:, 5], after)[0][row : row + 1], alone, atol=1e-5, rtol=1e-4)


@compiled
def test_refusals():
    runtime = Runtime(drawn_program(3))
    state = runtime.new_state(2, 20)
    with pytest.raises(ValueError, match=r"a number from 0 to 3 for each of 2 rows; got \[4, 0\]"):
        runtime.verify(torch.ones(2, 3, dtype=torch.int64), state).accept([4, 0])
    with pytest.raises(ValueError, match="a number from 0 to 3 for each of 2 rows"):
        runtime.verify(torch.ones(2, 3, dtype=torch.int64), state).accept([1])
    with pytest.raises(ValueError, match=f"at most {MOST_ROWS} tokens"):
        runtime.verify(torch.ones(2, 13, dtype=torch.int64), state)
    assert state.position.tolist() == [0, 0]
