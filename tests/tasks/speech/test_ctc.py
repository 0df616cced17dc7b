"""Decoding against the sum over all paths, written out; and edits against their definition."""

from collections import defaultdict
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.functional import ctc_loss

from tarnn.tasks.speech.ctc import beam_search, best_path, edits, error_rate


def drawn(seed, places=5, symbols=3):
    return torch.randn(places, symbols, generator=torch.Generator().manual_seed(seed)).double().mul(2).log_softmax(-1)


def collapsed(path):
    return tuple(b for a, b in zip((0, *path), path) if b not in (0, a))


def probabilities(log_p):
    """Of each transcript, summed over all paths."""
    found = defaultdict(float)
    for path in product(range(log_p.shape[1]), repeat=len(log_p)):
        found[collapsed(path)] += float(log_p[range(len(path)), path].sum().exp())
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_wide_beam_finds_the_most_likely_transcript(seed):
    log_p = drawn(seed)
    every = probabilities(log_p)
    best = max(every, key=every.get)
    assert tuple(beam_search(log_p.numpy(), 200)) == best
    loss = ctc_loss(log_p[:, None], torch.tensor([best or (1,)]), [5], [len(best)], reduction="sum")
    assert every[best] == pytest.approx(float((-loss).exp()))


def test_a_beam_finds_what_the_best_path_misses():
    log_p = np.log([[0.6, 0.4], [0.6, 0.4]])  # blank, blank: 0.36; but 1 has 0.64 in three paths
    assert (best_path(log_p), beam_search(log_p, 4)) == ([], [1])


@pytest.mark.parametrize("seed", range(5))
def test_the_best_path_in_pieces_is_that_of_the_whole(seed):
    log_p = drawn(seed, places=30).numpy()
    assert best_path(log_p) == list(collapsed(log_p.argmax(-1)))
    found, last = [], 0
    for piece in np.array_split(log_p, 7):
        found += best_path(piece, last)
        last = int(piece[-1].argmax())
    assert found == best_path(log_p)


@given(st.text("abc", max_size=6), st.text("abc", max_size=6))
def test_edits(a, b):
    @lru_cache
    def definition(i, j):
        if not i or not j:
            return i + j
        return min(
            definition(i - 1, j) + 1, definition(i, j - 1) + 1, definition(i - 1, j - 1) + (a[i - 1] != b[j - 1])
        )

    assert edits(a, b) == definition(len(a), len(b))


def test_the_rate_is_over_all_symbols():
    assert error_rate([("ab", "abcd"), ("x", "")]) == 75
    assert error_rate([]) == 0
