"""Windows over ids: what is an input, what a target, how often, in which order."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import DataLoader

from tarnn.data.examples import collate
from tarnn.errors import UserError
from tarnn.tasks.text.windows import ValidationBatches, Windows, WindowSampler


def test_targets_are_the_inputs_one_place_on():
    windows = Windows(np.arange(11, dtype=np.uint16), context=3)
    assert len(windows) == 8
    batch = windows.__getitems__([0, 7])
    assert batch["input_ids"].tolist() == [[0, 1, 2], [7, 8, 9]]
    assert batch["targets"].tolist() == [[1, 2, 3], [8, 9, 10]]
    assert batch["input_ids"].dtype == torch.int64


def test_a_data_loader_gathers_a_batch_at_once(monkeypatch):
    windows = Windows(np.arange(50, dtype=np.uint16), context=4)
    monkeypatch.setattr(Windows, "__getitem__", lambda *_: pytest.fail("one at a time"))
    loader = DataLoader(windows, batch_size=3, sampler=WindowSampler(windows, 9, seed=0), collate_fn=collate)
    assert [batch["input_ids"].shape for batch in loader] == [(3, 4)] * 3


@given(length=st.integers(2, 60), context=st.integers(1, 20), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_has_each_token_as_a_target_at_most_once_and_nearly_all(length, context, seed, epoch):
    if length <= context:
        return
    windows = Windows(np.arange(length), context)
    starts = WindowSampler(windows, 1, seed).epoch(epoch)
    targets = Counter(windows.__getitems__(starts.tolist())["targets"].flatten().tolist())
    assert max(targets.values()) == 1
    assert len(targets) >= length - 1 - 2 * (context - 1)


def test_the_order_depends_on_seed_and_epoch_alone():
    windows = Windows(np.arange(1000), context=7)
    whole = list(WindowSampler(windows, 500, seed=3))
    assert whole[:200] == list(WindowSampler(windows, 200, seed=3))  # more steps don't change what comes first
    assert len(whole) == len(WindowSampler(windows, 500, seed=3)) == 500
    per_epoch = len(WindowSampler(windows, 1, seed=3).epoch(0))
    assert whole[per_epoch:] != whole[: 500 - per_epoch]
    assert {start % 7 for start in whole[:per_epoch]} != {start % 7 for start in whole[per_epoch : 2 * per_epoch]}
    assert whole[:200] != list(WindowSampler(windows, 200, seed=4))


@given(length=st.integers(2, 70), context=st.integers(1, 20), batch_size=st.integers(1, 5))
def test_validation_counts_every_token_but_the_first_exactly_once(length, context, batch_size):
    if length <= context:
        return
    batches = ValidationBatches(np.arange(length, dtype=np.uint16), context, batch_size)
    targets = [t for batch in batches for t in batch["targets"].flatten().tolist() if t != -100]
    assert targets == list(range(1, length))
    for batch in batches:
        assert batch["input_ids"].shape[1] == context
        assert batch["input_ids"].min() >= 0


def test_text_shorter_than_a_context_and_a_context_of_nothing():
    with pytest.raises(UserError, match=r"has 5 tokens, fewer than one context of 5 .* --context below 5"):
        Windows(np.arange(5), context=5)
    with pytest.raises(UserError, match=r"a context of 0 .* expected --context 1 or more"):
        Windows(np.arange(5), context=0)
