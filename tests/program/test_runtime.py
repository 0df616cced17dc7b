"""The compiled runtime against the definition, and its law: a row's bits depend on its own tokens alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.drawn_programs import MIXERS, VOCABULARY, drawn_program

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program import definition, runtime as runtime_module
from tarnn.program.recording import Recorder, apply, heads, norm, product, rotate, softmax
from tarnn.program.runtime import Runtime
from tarnn.program.state import check_state

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")
SEEDS = st.integers(0, 2**31)
LENGTHS = (9, 2, 14)


def tokens(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def padded(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(x) for x in rows])[:, None]


def read(runtime, rows, pieces=(14,)):
    """Logits after each token of each row, read in pieces of these lengths."""
    state = runtime.new_state(len(rows), max(map(len, rows)))
    found, done = [[] for _ in rows], 0
    for n in pieces:
        parts = [x[done : done + n] for x in rows]
        if not all(map(len, parts)):
            break  # a call wants a token of each row
        ids, mask = padded(parts)
        logits, state = runtime.prefill(ids, state, mask, every=True)
        for row, x, real in zip(found, logits, mask, strict=True):
            row.append(x[real])
        done += n
    return [torch.cat(x) for x in found]


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_drawn_programs_are_as_defined(seed):
    program, rows = drawn_program(seed), tokens(seed)
    states = definition.new_states(program, len(rows), dtype=torch.float64)
    exact, _ = definition.run(program, rows, states, positions=[0] * len(rows), dtype=torch.float64)
    plain, _ = definition.run(program, rows, definition.new_states(program, len(rows)), positions=[0] * len(rows))
    for x, y, z in zip(read(Runtime(program), rows), exact, plain, strict=True):
        error, allowed = (x - y).abs().max(), (z - y).abs().max()
        assert error <= 4 * allowed + 2e-5 * y.abs().max()


@pytest.mark.parametrize("weights", FORMATS)
@settings(max_examples=12, deadline=None)
@given(seed=SEEDS, piece=st.integers(1, 6))
def test_bits_depend_on_the_row_alone(weights, seed, piece):
    runtime, rows = Runtime(drawn_program(seed), weights), tokens(seed)
    whole = read(runtime, rows)
    (alone,) = read(runtime, rows[2:], [piece] * 14)
    assert torch.equal(whole[2], alone)
    steps = runtime.new_state(1, LENGTHS[0])
    for i, token in enumerate(rows[0]):
        logits, steps = runtime(token[None], steps, inplace=True)
        assert torch.equal(logits[0], whole[0][i])


@pytest.mark.parametrize("weights", FORMATS)
def test_threads_do_not_change_bits(weights):
    rows, before = tokens(5), torch.get_num_threads()
    runtimes = [Runtime(drawn_program(seed), weights) for seed in range(len(MIXERS))]
    one = [read(x, rows) for x in runtimes]
    try:
        torch.set_num_threads(3)
        three = [read(x, rows) for x in runtimes]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for a, b in zip(one, three, strict=True) for x, y in zip(a, b, strict=True))


def llama(layers):
    record, generator = Recorder(limit=2000), torch.Generator().manual_seed(0)

    def weight(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    x = record.embed(table := weight(30, 24))
    for _ in range(layers):
        h = norm(x, weight(24) + 1, eps=1e-6)
        q, k, v = (heads(product(h, weight(6 * n, 24)), n) for n in (4, 2, 2))
        q, k = (rotate(y, torch.tensor([1.0, 0.1, 0.01])) for y in (q, k))
        x = x + product(softmax(q, k, v, record.state("KVCache"), scale=6**-0.5), weight(24, 24))
        h = norm(x, weight(24) + 1, eps=1e-6)
        x = x + product(apply(product(h, weight(40, 24)), "silu") * product(h, weight(40, 24)), weight(24, 40))
    return record.head(norm(x, weight(24) + 1, eps=1e-6), table)


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_long_cache_is_read_in_blocks_from_its_beginning(weights):
    """Blocks of 512 keys, of which several may be there, and prompts of several blocks of rows."""
    runtime = Runtime(llama(2), weights)
    rows = [torch.randint(30, (n,), generator=torch.Generator().manual_seed(n)) for n in (1100, 3, 530)]
    whole = read(runtime, rows, [1100])
    for piece in (513, 97):
        (alone,) = read(runtime, rows[:1], [piece] * 12)
        assert torch.equal(alone, whole[0])


@pytest.mark.parametrize("layers", [1, 3])
def test_five_phases_a_layer(layers):
    """q, k and v; attention; output and norm; gate and up; down and norm. Besides the embedding and the head."""
    assert Runtime(llama(layers)).num_phases == 5 * layers + 2


def test_caches_in_bfloat16():
    runtime, ids = Runtime(llama(1)), torch.arange(20)[None]
    exact, _ = runtime.prefill(ids, runtime.new_state(1, 20))
    rounded, state = runtime.prefill(ids, runtime.new_state(1, 20, torch.bfloat16))
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()
    assert all(x.dtype == torch.bfloat16 for x in (state.layers[0].rows[0].k, state.layers[0].rows[0].v))


def test_a_step_in_place_writes_into_its_state():
    runtime = Runtime(llama(1))
    state, logits = runtime.new_state(2, 4), torch.empty(2, 30)
    step = runtime.over(state, logits)
    for token in range(4):
        step(torch.tensor([token, 29 - token]))
    expected, _ = runtime.prefill(torch.stack([torch.arange(4), 29 - torch.arange(4)]), runtime.new_state(2, 4))
    assert torch.equal(logits, expected)
    assert state.position.tolist() == [4, 4]
    with pytest.raises(ValueError, match="cache is full"):
        step(torch.tensor([0, 0]))


def test_a_state_that_goes_on_is_checked_once(monkeypatch):
    """Later ones are known by the identity of their layers."""
    runtime, looks = Runtime(llama(2)), []
    monkeypatch.setattr(runtime_module, "check_state", lambda *arguments: looks.append(check_state(*arguments)))
    _, state = runtime.prefill(torch.arange(6).view(2, 3), runtime.new_state(2, 12), inplace=True)
    for token in range(4):
        _, state = runtime(torch.tensor([token, 9]), state, inplace=True)
    ids, mask = torch.tensor([[1, 2], [0, 3]]), torch.tensor([[1, 1], [0, 1]])
    _, state = runtime.prefill(ids, state, mask, inplace=True)
    assert len(looks) == 1
    runtime(torch.tensor([1, 2]), state.clone())
    assert len(looks) == 2


UNKNOWN = {
    "a row too many": (lambda r, s, **how: r(torch.tensor([1, 2, 3]), s, **how), "2 rows; this program has"),
    "no room for a prompt": (
        lambda r, s, **how: r.prefill(torch.zeros(2, 4, dtype=torch.long), s, **how),
        "cache is full",
    ),
    "no room in one row": (
        lambda r, s, **how: r.prefill(
            torch.zeros(2, 4, dtype=torch.long), s, torch.tensor([[1, 0, 0, 0], [1] * 4]), **how
        ),
        "holds 5 positions, 2 are taken and 4 more",
    ),
    "other positions": (
        lambda r, s, **how: r(torch.tensor([1, 2]), replace(s, position=s.position + 1), **how),
        "as many keys as",
    ),
    "positions of another type": (
        lambda r, s, **how: r(torch.tensor([1, 2]), replace(s, position=s.position.int()), **how),
        "rows",
    ),
    "other layers": (
        lambda r, s, **how: r(torch.tensor([1, 2]), replace(s, layers=s.layers[:1]), **how),
        "the state has 1 layers",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_state_that_goes_on_is_refused_as_a_new_one(case):
    runtime = Runtime(llama(2))
    _, state = runtime.prefill(torch.ones(2, 2, dtype=torch.long), runtime.new_state(2, 5), inplace=True)
    before = state.clone()
    call, sentence = UNKNOWN[case]
    for how in ({}, {"inplace": True}):
        with pytest.raises(ValueError, match=sentence):
            call(runtime, state, **how)
    for x, y in zip(state.tensors().values(), before.tensors().values(), strict=True):
        assert torch.equal(x, y)


REFUSED = {
    "a token beyond the vocabulary": (lambda r: r(torch.tensor([30]), r.new_state(1, 4)), "from 0 to 29; got 30"),
    "a negative token": (lambda r: r(torch.tensor([-1]), r.new_state(1, 4)), "from 0 to 29; got -1"),
    "a cache without room": (lambda r: r(torch.tensor([1]), r.new_state(1, 0)), "cache is full"),
    "rows that are not there": (lambda r: r(torch.tensor([1, 2]), r.new_state(1, 4)), "rows"),
    "numbers with a fraction": (lambda r: r(torch.tensor([0.5]), r.new_state(1, 4)), "whole numbers"),
    "more positions than there are": (
        lambda r: r.prefill(torch.zeros(1, 2001, dtype=torch.long), r.new_state(1, 2001)),
        "2,000 positions",
    ),
    "a state of another program": (lambda r: r(torch.tensor([1]), Runtime(llama(2)).new_state(1, 4)), "layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(case):
    call, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        call(Runtime(llama(1)))
    with pytest.raises(ValueError, match="one of float32, bfloat16, int8, int4"):
        Runtime(llama(1), "int3")
