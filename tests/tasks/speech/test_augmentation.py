"""Recordings drawn anew: tempo and masks against their definitions, and draws that only seed, epoch and row decide."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tarnn.tasks.speech.augmentation import AugmentedRows, SimilarLengths, at_tempo, masked
from tarnn.tasks.speech.ctc import places_needed
from tarnn.tasks.speech.task import FILL


@given(st.integers(1, 40), st.integers(1, 60))
def test_at_another_tempo_frames_are_interpolated(length, count):
    frames = np.random.default_rng(length).normal(size=(length, 3))
    middles = (np.arange(count) + 0.5) / count  # of each new frame, as a part of the whole
    expected = [np.interp(middles, (np.arange(length) + 0.5) / length, column) for column in frames.T]
    np.testing.assert_allclose(at_tempo(frames, count), np.stack(expected, 1), atol=1e-12)


def test_at_its_own_tempo_a_recording_is_itself():
    frames = np.random.default_rng(0).normal(size=(17, 3)).astype(np.float32)
    assert (at_tempo(frames, 17) == frames).all()
    assert at_tempo(frames, 20).dtype == np.float32


@given(st.integers(1, 300), st.integers(1, 45), st.integers(0, 2**32))
def test_masks_are_two_stretches_and_a_band(count, numbers, seed):
    frames = np.ones((count, numbers))
    found = masked(frames, np.random.default_rng(seed))
    assert frames.all()  # what is given stays as it is
    silent, lost = (found == 0).all(1), (found == 0).all(0)
    assert silent.sum() <= 2 * min(20, count // 8) or lost.all()
    assert (np.diff(silent.astype(int)) == 1).sum() <= 2
    assert lost.sum() <= numbers // 5 or silent.all()
    assert (found == ~(silent[:, None] | lost)).all()


def test_masks_reach_their_longest():
    draws = [masked(np.ones((400, 13)), np.random.default_rng(i)) for i in range(400)]
    assert {int((x == 0).all(0).sum()) for x in draws} == {0, 1, 2}
    assert max(int((x == 0).all(1).sum()) for x in draws) > 35  # two of up to 20


@pytest.fixture
def rows():
    """The last has just as many frames as its labels need."""
    draw = np.random.default_rng(0)
    made = [(30 + 7 * i, draw.integers(1, 4, 5)) for i in range(6)] + [(15, np.array([1, 2, 2, 1, 3, 3]))]
    return [{"input_features": draw.normal(size=(n, 4)).astype(np.float32), "labels": ids} for n, ids in made]


def test_epoch_and_row_alone_decide_what_is_drawn(rows):
    data = AugmentedRows(rows, FILL, 2, seed=3)
    together, alone = data.__getitems__([1, 7 + 1, 7 + 4]), data[7 + 1]
    length = len(alone["input_features"])
    assert (together["input_features"][1, :length] == alone["input_features"]).all()
    assert together["attention_mask"][1].sum() == length
    assert (together["labels"][1] == alone["labels"]).all()
    assert len({len(data[7 * epoch + 1]["input_features"]) for epoch in range(40)}) > 4  # of 37: 33 to 41
    other = AugmentedRows(rows, FILL, 2, seed=4)
    assert any(other[i]["input_features"].shape != data[i]["input_features"].shape for i in range(6))


def test_no_recording_becomes_too_short_for_its_labels(rows):
    data = AugmentedRows(rows, FILL, 2, seed=0)
    for epoch in range(30):
        drawn = data.drawn(epoch, 6)
        assert -(-len(drawn["input_features"]) // 2) >= places_needed(drawn["labels"]) == 8


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5))
def test_an_epoch_has_each_row_once(count, together, seed):
    order = list(SimilarLengths(np.arange(count) + 5, 4 * count, seed, together))
    for epoch in range(4):
        assert sorted(order[epoch * count : (epoch + 1) * count]) == [epoch * count + i for i in range(count)]
    assert order[: 2 * count + 1] == list(SimilarLengths(np.arange(count) + 5, 2 * count + 1, seed, together))


def test_batches_are_alike_in_length_and_differ_from_epoch_to_epoch():
    lengths = np.random.default_rng(0).integers(50, 600, 101)
    order = np.array(list(SimilarLengths(lengths, 3 * 101, 0, 8)))[: 37 * 8].reshape(37, 8)
    longest, every = lengths[order % 101].max(1), lengths[order % 101]
    assert every.sum() / (8 * longest.sum()) > 0.8  # at random: less than 0.6
    batches = [{frozenset(batch.tolist()) for batch in order[12 * i : 12 * i + 12] % 101} for i in range(3)]
    assert not batches[0] & batches[1]
    assert np.corrcoef(longest, np.arange(37))[0, 1] ** 2 < 0.3  # not from short to long
