"""Frames of sound, held against transformers and scipy; and what does not fit a model."""

import numpy as np
import pytest
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from tarnn.errors import UserError
from tarnn.huggingface.speech_features import cosines
from tarnn.models import SpeechFeatures

SOUND = np.random.default_rng(0).normal(0, 0.1, 4000).astype(np.float32)


def test_rates_and_lengths_that_do_not_fit():
    front = SpeechFeatures(20, 8000, num_filters=20)
    with pytest.raises(UserError, match=r"a\.wav has 44,100 samples per second; expected 8,000, as in training"):
        front.check(SOUND, 44100, "a.wav")
    with pytest.raises(UserError, match="has 100 samples, less than one frame of 200"):
        front(SOUND[:100], sampling_rate=8000)
    with pytest.raises(ValueError, match="log_mel or mfcc; got 'fft'"):
        SpeechFeatures(kind="fft")


def test_frames_are_those_of_transformers():
    front = SpeechFeatures(20, 8000, num_filters=20)
    bank = mel_filter_bank(129, 20, 20.0, 4000.0, 8000, norm=None, mel_scale="htk")
    expected = spectrogram(
        SOUND,
        window_function(200, "hamming"),
        200,
        80,
        256,
        power=2.0,
        center=False,
        preemphasis=0.97,
        mel_filters=bank,
        log_mel="log",
        mel_floor=1e-10,
    ).T
    np.testing.assert_allclose(front.frames(SOUND), expected, rtol=1e-4, atol=1e-4)


def test_cepstra_are_a_cosine_transform(tmp_path):
    fft = pytest.importorskip("scipy.fft")
    mel, front = SpeechFeatures(20, 8000, num_filters=20), SpeechFeatures(13, 8000, "mfcc", num_filters=20)
    expected = fft.dct(mel.frames(SOUND), norm="ortho")[:, :13]
    np.testing.assert_allclose(front.frames(SOUND), expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(cosines(20, 20).T @ cosines(20, 20), np.eye(20), atol=1e-12)


def test_frames_of_a_part_are_those_of_the_whole():
    front = SpeechFeatures(20, 8000, num_filters=20)
    np.testing.assert_array_equal(front.frames(SOUND)[5:], front.frames(SOUND[5 * 80 :]))


def test_padded_batches_and_saving(tmp_path):
    front = SpeechFeatures(20, 8000, num_filters=20, mean=[1.0] * 20, std=[2.0] * 20)
    front.save_pretrained(tmp_path)
    batch = SpeechFeatures.from_pretrained(tmp_path)([SOUND, SOUND[:1000]], 8000, return_tensors="np")
    assert batch["attention_mask"].sum(-1).tolist() == [48, 11]
    np.testing.assert_allclose(batch["input_features"][1, :11], front.frames(SOUND[:1000]))
    assert not batch["input_features"][1, 11:].any()
