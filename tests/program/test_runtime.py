"""The compiled runtime against the definition, and its law: a row's bits depend on its own tokens alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.drawn_programs import MIXERS, VOCABULARY, drawn_program

from tarnn.kernels.cpu import library
from tarnn.kernels.cpu.products import FORMATS
from tarnn.program import definition, runtime as runtime_module
from tarnn.program.recording import Recorder, apply, delta, heads, norm, product, rotate, softmax
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


def test_eight_threads_on_any_number_of_cores_give_the_same_bits():
    """They wait for each other only where one is inside a task, so it ends."""
    runtime, before = Runtime(drawn_program(2)), torch.get_num_threads()
    rows, results = torch.arange(100).view(5, 20) % VOCABULARY, []
    try:
        for threads in (1, 8):
            torch.set_num_threads(threads)
            logits, state = runtime.prefill(rows, runtime.new_state(5, 60))
            for i in range(40):
                logits, state = runtime(torch.tensor([i % 7] * 5), state)
            results.append(logits)
    finally:
        torch.set_num_threads(before)
    position = torch.zeros(5, dtype=torch.int64)
    taken = [torch.ops.tarnn_cpu.program_threads(runtime.handle, position, n) for n in (1, 2, 8)]
    assert taken[:2] == [1, 2] < taken[1:]
    assert torch.equal(*results)


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


class OneLayer:
    """A recorder of one layer between an embedding, with positions of its own, and a head; its last token is no number."""

    def __init__(self) -> None:
        self.record, self.generator = Recorder(limit=2000), torch.Generator().manual_seed(3)
        tokens = torch.cat([self.weight(29, 16), torch.full((1, 16), torch.nan)])
        self.x = self.record.embed(tokens, places=self.weight(2000, 8), width=24)

    def weight(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def heads(self, n, width):
        return heads(product(self.x, self.weight(n * width, 24) / 5), n)

    def opened(self, y):
        return Runtime(self.record.head(y, self.weight(30, y.size) / y.size**0.5))


def one_softmax(q_heads, k_heads, d, e, latent=False):
    one = OneLayer()
    q, k, v = one.heads(q_heads, d), one.heads(k_heads, d), one.heads(k_heads, e)
    return one.opened(softmax(q, k, e if latent else v, one.record.state("KVCache"), scale=d**-0.5))


def has_the_bits_of_steps(runtime, ids, new_state, steps, pieces):
    """Compare a prompt with steps from some place on, and then with pieces, each from one of `pieces` to the next."""
    whole, _ = runtime.prefill(ids, new_state(), every=True)
    _, state = runtime.prefill(ids[:, :steps], new_state())
    for i in range(steps, pieces[0]):
        logits, state = runtime(ids[:, i], state, inplace=True)
        assert torch.equal(logits[0], whole[0, i])
    for begin, end in zip(pieces, pieces[1:], strict=False):
        logits, state = runtime.prefill(ids[:, begin:end], state, every=True)
        assert torch.equal(logits[0], whole[0, begin:end])


def some_ids(n):
    return torch.randint(29, (1, n), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("cache", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [(2, 2, 64, 64), (4, 1, 256, 256), (6, 2, 20, 33), (3, 3, 7, 48), (16, 1, 40, 24, True)], ids=str
)
def test_keys_that_many_queries_read_give_the_bits_of_steps(sizes, cache):
    """Prompts turn keys around; pieces end within blocks of 512 keys and at them, and a step reads one token."""
    runtime = one_softmax(*sizes)
    new_state = partial(runtime.new_state, 1, 620, cache)
    has_the_bits_of_steps(runtime, some_ids(620), new_state, 440, (450, 457, 512, 513, 620))


@pytest.mark.parametrize("sizes", [(2, 2, 128, 128), (1, 3, 64, 72), (4, 2, 20, 19)], ids=str)
@pytest.mark.parametrize("channels", [False, True])
def test_tokens_that_share_passes_over_a_state_give_the_bits_of_steps(sizes, channels):
    k_heads, v_heads, d, e = sizes
    one, n = OneLayer(), max(k_heads, v_heads)
    q, k = (norm(one.heads(k_heads, d), eps=1e-6, kind="l2") for _ in range(2))
    log_decay = apply(apply(one.heads(n, d if channels else 1), "softplus"), "neg") * 0.1
    beta = apply(one.heads(n, 1), "sigmoid")
    state = one.record.state("DeltaState")
    runtime = one.opened(delta(q, k, one.heads(v_heads, e), beta, state, log_decay=log_decay))
    has_the_bits_of_steps(runtime, some_ids(110), partial(runtime.new_state, 1), 20, (30, 32, 45, 46, 110))


def test_what_is_no_number_stays_with_later_tokens():
    """A token that is NaN is seen by itself and those behind it, in a tile of queries, too."""
    runtime, ids = one_softmax(2, 2, 16, 16), some_ids(100)
    clean, _ = runtime.prefill(ids, runtime.new_state(1, 100), every=True)
    ids[0, 41] = 29
    logits, _ = runtime.prefill(ids, runtime.new_state(1, 100), every=True)
    assert torch.equal(logits[0, :41], clean[0, :41])
    assert logits[0, 41:].isnan().all()


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
