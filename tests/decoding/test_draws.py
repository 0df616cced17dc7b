"""A row's token depends on its own logits and its own line of the table alone, and is drawn as the samplers say."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from support.draw_calls import SOME, alike, near, sampling, some_logits

from tarnn.decoding.draw_definition import kept
from tarnn.decoding.draws import RowSampling, draw_rows
from tarnn.decoding.philox import philox, uniform
from tarnn.decoding.samplers import keep_min_p, keep_top_k, keep_top_p


def table(*ways, v, **arguments):
    rows = RowSampling(len(ways), v)
    for i, way in enumerate(ways):
        rows.put(i, way, **{"seed": i, **arguments})
    return rows


ways = st.builds(sampling, **{name: st.sampled_from(values) for name, values in SOME.items()})
seeds = st.integers(-(2**63), 2**64 - 1)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(counter, key, words):
    """Of the paper's own table of known answers (kat_vectors, philox4x32 10)."""
    assert philox(counter, key) == words


@given(seeds, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_uniform_numbers_are_from_zero_to_below_one(seed, choice, position):
    number = uniform(seed, choice, position)
    assert 0 <= number < 1
    assert number != uniform(seed, choice, position + 1)
    assert number == uniform(seed - 2**64, choice, position)


@given(ways, st.integers(0, 2**32))
def test_filters_are_those_of_the_samplers(way, seed):
    """Of distributions without ties, in which those leave open who goes first."""
    way.temperature = way.temperature or 1.0
    scores = some_logits(1, 29, seed).double()
    warped = scores / way.temperature
    for warp in [
        *([keep_top_k(way.top_k)] if way.top_k else []),
        *([keep_top_p(way.top_p)] if way.top_p < 1 else []),
        *([keep_min_p(way.min_p)] if way.min_p else []),
    ]:
        warped = warp(warped)
    assert np.array_equal(kept(scores[0].numpy(), way), warped[0].isfinite().numpy())


@given(st.lists(st.tuples(ways, seeds), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_row_draws_the_same_in_any_company(rows_of_table, seed):
    v = 37
    logits = some_logits(len(rows_of_table), v, seed)
    rows = RowSampling(len(rows_of_table), v)
    for i, (way, its_seed) in enumerate(rows_of_table):
        rows.put(i, way, seed=its_seed, prompt=[1, 5], written=[i, 3, 3], likeliest=i)
    together = draw_rows(logits, rows)
    for i, (way, its_seed) in enumerate(rows_of_table):
        alone = RowSampling(1, v)
        alone.put(0, way, seed=its_seed, prompt=[1, 5], written=[i, 3, 3], likeliest=i)
        result = draw_rows(logits[i : i + 1], alone)
        assert result.tokens[0] == together.tokens[i]
        assert torch.equal(result.logprobs[0], together.logprobs[i])
        assert torch.equal(result.likeliest[0], together.likeliest[i, :i])


def test_the_kernel_draws_what_the_definition_draws():
    """But where a sum of probabilities is within rounding of the random number or of a limit."""
    assert [seed for seed in range(300) if not alike(seed)] == []


@given(st.integers(0, 2**32), st.sampled_from([3, 64, 200]), st.data())
def test_ties_are_cut_where_the_definition_cuts_them(seed, v, data):
    """Logits from few values, whose exponentials are powers of two: all sums are exact."""
    logits = torch.randint(-3, 1, (1, v), generator=torch.Generator().manual_seed(seed)) * np.float32(np.log(2))
    way = sampling(
        top_k=data.draw(st.integers(0, v)),
        top_p=data.draw(st.integers(1, 64)) / 64,
        min_p=data.draw(st.sampled_from([0.0, 0.2, 0.4, 0.8])),
    )
    rows = table(way, v=v, seed=seed)
    token = int(draw_rows(logits, rows).tokens[0])
    assert token in near(logits[0].numpy(), rows.way(0))
    assert kept(logits[0].numpy().astype(np.float64), rows.way(0))[token] or 0 < way.top_p < 1


def test_many_rows_by_many_threads_are_those_of_one():
    v, b = 33_000, 9
    logits, most = some_logits(b, v), torch.get_num_threads()
    rows = table(*[sampling(top_p=0.9), sampling(), sampling(top_k=50, min_p=0.02)] * 3, v=v, likeliest=5)
    draws = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            draws.append(draw_rows(logits, rows))
    finally:
        torch.set_num_threads(most)
    assert all(torch.equal(one, other) for one, other in zip(*draws))


def test_equals_go_in_the_order_of_their_ids():
    """Of 4,096 equal tokens, top-p of a half keeps the first half; and the likeliest are the first ones."""
    v = 4096
    rows = table(*[sampling(top_p=0.5)] * 64, v=v, likeliest=3)
    drawn_of_all = draw_rows(torch.zeros(64, v), rows)
    assert drawn_of_all.tokens.max() < v // 2
    assert drawn_of_all.tokens.max() > v // 4
    assert drawn_of_all.likeliest.tolist() == [[0, 1, 2]] * 64


def test_draws_are_distributed_as_the_logits_say():
    """20,000 draws of the same logits with other seeds: χ² of 11 degrees of freedom, below its 1 − 1e-6 quantile."""
    v, n = 12, 20_000
    logits = some_logits(1, v, spread=1.0).expand(n, v).contiguous()
    rows = table(*[sampling(temperature=0.8)] * n, v=v)
    counts = draw_rows(logits, rows).tokens.bincount(minlength=v).double()
    expected = n * (logits[0].double() / 0.8).softmax(-1)
    assert ((counts - expected) ** 2 / expected).sum() < 50.0


@given(st.integers(0, 2**32), seeds)
def test_the_one_likeliest_is_greedy(seed, its_seed):
    logits = some_logits(2, 53, seed)
    rows = table(sampling(top_k=1), sampling(top_p=1e-9), v=53, seed=its_seed)
    assert torch.equal(draw_rows(logits, rows).tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_told_row_by_row(temperature):
    logits = some_logits(5, 33)
    logits[1, 32], logits[2, 4], logits[3, :], logits[4, :32] = torch.nan, torch.inf, -torch.inf, -torch.inf
    drawn = draw_rows(logits, table(*[sampling(temperature=temperature)] * 5, v=33, likeliest=1))
    assert drawn.tokens[1:].tolist() == [-1, -1, -1, 32]
    assert drawn.tokens[0] >= 0
    assert drawn.logprobs.isnan().tolist() == [False, True, True, True, False]
    assert drawn.likeliest[1:].tolist() == [[-1], [-1], [-1], [32]]


def test_penalties_are_of_what_was_written():
    v = 5
    logits = torch.tensor([[1.0, 0.9, -0.5, 0.0, 0.8]])

    def greedy(prompt=(), written=(), **given):
        rows = table(sampling(temperature=0.0, **given), v=v, prompt=prompt, written=written)
        return int(draw_rows(logits, rows).tokens[0])

    assert greedy(repetition_penalty=2.0, prompt=[0]) == 1
    assert greedy(repetition_penalty=2.0, prompt=[0], written=[1]) == 4
    assert greedy(presence_penalty=0.5, written=[0, 0, 1]) == 4
    assert greedy(presence_penalty=0.5, prompt=[0]) == 0
    assert greedy(frequency_penalty=0.05, written=[0]) == 0
    assert greedy(frequency_penalty=0.05, written=[0] * 3) == 1
    assert greedy(logit_bias={2: 3.0}) == 2


@given(ways, seeds)
def test_a_row_that_goes_on_is_as_if_it_had_never_stopped(way, seed):
    """Counts and places are the same whether a row wrote its answer here or came with it; and after it moved."""
    v, through, moved = 11, RowSampling(1, 11), RowSampling(3, 11)
    through.put(0, way, seed=seed, prompt=[4])
    answer = []
    for i in range(6):
        logits = some_logits(1, v, i)
        came = table(way, v=v, seed=seed, prompt=[4], written=answer)
        moved.put(2, way, seed=seed, prompt=[4], written=answer)
        moved.move(2, 0)
        tokens = draw_rows(logits, through).tokens
        assert tokens == draw_rows(logits, came).tokens == draw_rows(logits, moved).tokens
        through.wrote(tokens)
        answer += tokens.tolist()


def test_logarithms_are_of_temperature_one_without_penalties():
    v = 19
    logits = some_logits(3, v)
    rows = table(sampling(temperature=0.0), sampling(top_k=2, logit_bias={3: 40.0}), sampling(), v=v)
    assert draw_rows(logits, rows).logprobs is None
    rows.put(0, sampling(temperature=0.0), seed=0, likeliest=2)
    rows.put(1, sampling(top_k=2, logit_bias={3: 40.0}), seed=0, likeliest=4)
    drawn = draw_rows(logits, rows)
    expected = logits.double().log_softmax(-1)
    assert drawn.tokens[1] == 3
    torch.testing.assert_close(drawn.logprobs[:2].double(), expected[[0, 1], drawn.tokens[:2]], atol=1e-6, rtol=1e-6)
    assert drawn.logprobs[2].isnan()
    top = expected.sort(-1, descending=True)
    assert torch.equal(drawn.likeliest[1], top.indices[1, :4])
    assert drawn.likeliest[0].tolist() == [*top.indices[0, :2], -1, -1]
    assert drawn.likeliest[2].tolist() == [-1] * 4
    torch.testing.assert_close(drawn.likeliest_logprobs[1].double(), top.values[1, :4], atol=1e-6, rtol=1e-6)
    assert drawn.likeliest_logprobs[0, 2:].isnan().all()


OUT_OF_RANGE = [
    ({"temperature": -1.0}, {}, "temperature must be 0"),
    ({"temperature": float("inf")}, {}, "temperature must be 0"),
    ({"top_k": -1}, {}, "top-k must be 0"),
    ({"top_p": 0.0}, {}, "top-p must be above 0"),
    ({"min_p": 1.5}, {}, "min-p must be from 0"),
    ({"repetition_penalty": 0.0}, {}, "repetition-penalty must be above 0"),
    ({"frequency_penalty": float("nan")}, {}, "frequency-penalty must be finite"),
    ({"presence_penalty": float("inf")}, {}, "presence-penalty must be finite"),
    ({"logit_bias": {7: 1.0}}, {}, "logit-bias names token 7; the vocabulary has 0 to 6"),
    ({"logit_bias": {1: float("nan")}}, {}, "logit-bias of token 1 must be finite"),
    ({}, {"seed": 2**64}, "a seed has 64 bits"),
    ({}, {"choice": -1}, "a choice is counted from 0"),
    ({}, {"likeliest": 8}, "logprobs are of 0 to 7 tokens"),
]


@pytest.mark.parametrize(("way", "row", "sentence"), OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused(way, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        RowSampling(1, 7).put(0, sampling(**way), **{"seed": 0, **row})


@pytest.mark.parametrize("shape", [(1, 6), (3, 7), (7,)])
def test_logits_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"draw_rows takes logits \(b, 7\) of at most 2 rows"):
        draw_rows(torch.zeros(shape), table(sampling(), sampling(), v=7))
