"""Sound and transcripts as numbers: one sentence for each kind of damage."""

import struct
import wave

import numpy as np
import pytest

from tarnn.errors import UserError
from tarnn.tasks.speech.recordings import LETTERS, Symbols, letters_of, read_wav

SOUND = np.random.default_rng(0).normal(0, 0.1, 4000).astype(np.float32)


def write(path, samples=SOUND, rate=8000, channels=1, width=2):
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        whole = np.round(samples.astype(np.float64) * 2 ** (8 * width - 1)).astype(np.int64)
        whole += 128 if width == 1 else 0
        file.writeframes(b"".join(int(x).to_bytes(width, "little", signed=width > 1) for x in whole))
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_size(tmp_path, width):
    samples, rate = read_wav(write(tmp_path / "a.wav", width=width))
    assert (rate, samples.dtype) == (8000, np.float32)
    np.testing.assert_allclose(samples, SOUND, atol=2.0 ** (1 - 8 * width) + 1e-7)


def damaged(path, kind):
    data = write(path).read_bytes()
    if kind == "stereo":
        return write(path, channels=2)
    if kind == "no sound":
        return write(path, SOUND[:0])
    path.write_bytes(
        {
            "cut short": data[:-100],
            "no wav": b"ID3" + data,
            "empty": b"",
            "header": data[:20],
            "not PCM": data[:20] + struct.pack("<H", 85) + data[22:],
        }[kind]
    )
    return path


SENTENCES = {
    "stereo": "has 2 channels; expected one. Mix them",
    "no sound": "holds no sound",
    "cut short": "promises 4,000 samples and holds 3,950",
    "no wav": "not a wav file",
    "empty": "not a wav file",
    "header": "not a wav file",
    "not PCM": "not a wav file .*unknown format",
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_damage_is_told_with_the_file(tmp_path, kind):
    path = damaged(tmp_path / "a.wav", kind)
    with pytest.raises(UserError, match=SENTENCES[kind]) as error:
        read_wav(path)
    assert str(error.value).startswith(str(path))


def test_a_file_that_is_missing():
    with pytest.raises(UserError, match=r"b\.wav: no such file"):
        read_wav("b.wav")


def test_transcripts(tmp_path):
    letters = Symbols(LETTERS)
    ids = letters.ids(letters_of("rub  out"), "x")
    assert letters.text_of(ids) == "RUB|OUT"
    with pytest.raises(
        UserError, match=r"a\.txt, line 3: the transcript has 'É', which is not among the symbols \| ' A B"
    ):
        letters.ids(letters_of("café"), "a.txt, line 3")


def test_samples_of_64_bits_are_refused(tmp_path):
    samples = np.zeros(20, "<i8").tobytes()
    head = b"RIFF" + (36 + len(samples)).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
    rest = [(1, 2), (1, 2), (8000, 4), (64000, 4), (8, 2), (64, 2)]
    head += b"".join(x.to_bytes(n, "little") for x, n in rest) + b"data" + len(samples).to_bytes(4, "little")
    (tmp_path / "a.wav").write_bytes(head + samples)
    with pytest.raises(UserError, match="samples of 64 bits; expected 8, 16, 24 or 32"):
        read_wav(tmp_path / "a.wav")
