"""The experiment on speech: what is read, that padding changes nothing, and a run that goes on and can be transcribed with."""

import io
import wave
import zipfile

import numpy as np
import pytest
import speech
import torch

from tarnn.cli.main import main as command

TINY = ("--quick", "--utterances", 6, "--batch-size", 3, "--epochs", 1)


@pytest.fixture
def recordings(tmp_path):
    """Folders like those of AN4 and FSDD, of noise."""
    random, (an4, fsdd) = np.random.default_rng(0), (tmp_path / "data" / x for x in ("an4", "fsdd"))
    an4.mkdir(parents=True)
    fsdd.mkdir()
    (an4 / "an4.dic").write_text("NO  N OW\nA  AH\nA(2)  EY\n")
    (an4 / "an4.phone").write_text("AH\nN\nOW\n")
    for part, texts in (("train", ["NO", "A NO", "NO NO", "A A"]), ("test", ["NO A", "A"])):
        lengths = np.array([20 + 5 * i for i in range(len(texts))])
        np.savez(
            an4 / f"{part}.npz",
            features=random.normal(size=(lengths.sum(), 13)).astype(np.float16),
            offsets=np.append(0, lengths.cumsum()),
            ids=[f"u{i}" for i in range(len(texts))],
            text=texts,
        )
    with zipfile.ZipFile(fsdd / "recordings.zip", "w") as archive:
        for name in ("0_a_0", "1_a_9", "2_a_1", "7_b_40", "9_b_8"):
            with wave.open(file := io.BytesIO(), "wb") as sound:
                sound.setparams((1, 2, 8000, 0, "NONE", ""))
                sound.writeframes(random.normal(0, 3000, 3000).astype("<i2").tobytes())
            archive.writestr(f"{name}.wav", file.getvalue())
    return tmp_path / "data"


@pytest.fixture
def options(recordings, monkeypatch):
    monkeypatch.setattr("sys.argv", ["speech.py", "--quick", "--data", str(recordings)])
    lists = {"tasks": list(speech.TASKS), "methods": list(speech.METHODS)}
    return speech.parse(speech.__file__, "", speech.FULL | lists, speech.QUICK)


def test_what_is_read(options):
    phones, letters, digits = (speech.read(f"{x}", options) for x in ("an4 phones", "an4 letters", "fsdd letters"))
    assert phones.symbols.text_of(phones.train[1].ids, " ") == "AH N OW"
    assert letters.symbols.text_of(letters.train[1].ids) == "A|NO"
    assert {digits.symbols.text_of(x.ids) for x in digits.train} == {"ONE", "SEVEN", "NINE"}
    assert {digits.symbols.text_of(x.ids) for x in digits.test} == {"ZERO", "TWO"}
    every = np.concatenate([x.frames for x in digits.train])
    np.testing.assert_allclose([every.mean(), every.std()], [0, 1], atol=1e-4)


def test_a_word_that_is_unknown_and_a_sound_that_is_too_short(options, recordings, monkeypatch):
    (recordings / "an4" / "an4.dic").write_text("A  AH\n")
    with pytest.raises(ValueError, match=r"train\.npz, utterance u0: the transcript has 'NO'"):
        speech.read("an4 phones", options)
    monkeypatch.setitem(speech.TASKS, "fsdd letters", speech.Task(12, 1))
    with pytest.raises(speech.Unmeasured, match=r"recordings\.zip/9_b_8\.wav has 3 places for 4 symbols"):
        speech.read("fsdd letters", options)


@torch.no_grad()
@pytest.mark.parametrize("method", speech.METHODS)
def test_padding_changes_nothing(options, method):
    data = speech.read("an4 letters", options)
    model = speech.build(method, data, options).eval()
    rows = speech.padded([x.row for x in data.train])
    together = model(**rows.__getitems__(range(len(rows)))).logits
    for i, logits in enumerate(together):
        alone = model(**rows.__getitems__([i])).logits[0]
        torch.testing.assert_close(logits[: len(alone)], alone, rtol=1e-4, atol=1e-4)


def test_runs_goes_on_and_transcribes(script, data_of, pictures, recordings, tmp_path, capsys):
    given = (*TINY, "--data", recordings, "--runs", tmp_path / "runs", "--tasks", "fsdd letters")
    code, out, _ = script("speech", *given)
    assert code == 0
    found = data_of("speech")["results"]["errors"]["fsdd letters"]
    assert list(found) == list(speech.METHODS)
    assert all(x["epochs"] == 1 and 0 <= x["beam"] < 900 for x in found.values())
    assert "| fsdd letters | bi-LSTM |" in out
    assert "'step': 1," not in script("speech", *given, "--epochs", 2).out
    assert all(x["epochs"] == 2 for x in data_of("speech")["results"]["errors"]["fsdd letters"].values())
    epoch = ("--parts", "epoch", "--methods", "linear")
    assert script("speech", *given, "--epochs", 2, *epoch).code == 0
    after = data_of("speech")["results"]
    assert list(after["errors"]["fsdd letters"]) == list(speech.METHODS)  # what was there stays
    assert after["epoch"]["fsdd letters"]["linear"] > 0
    sound = tmp_path / "a.wav"
    with zipfile.ZipFile(recordings / "fsdd" / "recordings.zip") as archive:
        sound.write_bytes(archive.read("7_b_40.wav"))
    model = tmp_path / "runs" / "fsdd_letters_linear_causal" / "model"
    capsys.readouterr()
    assert command(["transcribe", str(sound), str(model), "--stream"]) == 0
    assert command(["transcribe", str(sound), str(model)]) == 0
    streamed, whole = capsys.readouterr().out.splitlines()
    assert streamed == whole
