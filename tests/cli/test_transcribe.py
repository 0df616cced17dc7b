"""`tarnn transcribe`: the same text whole, in batches of transformers, and as a stream; and what it refuses."""

import json
import shutil
import wave

import numpy as np
import pytest
import torch
from transformers import Wav2Vec2CTCTokenizer, pipeline

from tarnn.cli.transcribe import heard, open_speech
from tarnn.models import SpeechFeatures, TarnnConfig, TarnnForCTC
from tarnn.tasks.speech.ctc import best_path
from tarnn.tasks.speech.recordings import read_wav

SOUND = np.random.default_rng(0).normal(0, 3000, 9000).astype("<i2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Untrained models of speech by whether they are causal."""
    made = {}
    for causal in (True, False):
        torch.manual_seed(0)
        made[causal] = folder = tmp_path_factory.mktemp("speech")
        vocab = {name: i for i, name in enumerate(("<pad>", "|", "A", "B", "C", "<unk>"))}
        config = TarnnConfig(
            vocab_size=5,
            pad_token_id=0,
            input_size=12,
            subsampling=3,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            causal=causal,
            initializer_range=0.5,
        )
        TarnnForCTC(config).save_pretrained(folder)
        SpeechFeatures(12, 8000, num_filters=12, mean=[-6.0] * 12, std=[2.0] * 12).save_pretrained(folder)
        (folder / "vocab.json").write_text(json.dumps(vocab))
        Wav2Vec2CTCTokenizer(
            folder / "vocab.json", bos_token=None, eos_token=None, word_delimiter_token="|"
        ).save_pretrained(folder)
    return made


@pytest.fixture
def sound(tmp_path):
    def write(samples=SOUND, rate=8000):
        with wave.open(str(tmp_path / "a.wav"), "wb") as file:
            file.setparams((1, 2, rate, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
        return tmp_path / "a.wav"

    return write


def test_a_file_is_transcribed(command, folders, sound):
    model, front, tokenizer = open_speech(folders[False])
    samples, rate = read_wav(sound())
    done = command("transcribe", folders[False], sound())
    with torch.no_grad():
        logits = model(**front(samples, rate, return_tensors="pt")).logits
    assert done.code == 0, done.err
    assert done.out.split() == tokenizer.decode(logits[0].argmax(-1)).split()
    assert len(done.out) > 5
    assert command("transcribe", folders[False], sound(), "--beam", 8).code == 0


def test_the_pipeline_of_transformers_says_the_same(command, folders, sound):
    asr = pipeline("automatic-speech-recognition", model=str(folders[True]))
    samples, rate = read_wav(sound())
    found = asr({"raw": samples, "sampling_rate": rate})["text"]
    assert found.split() == command("transcribe", folders[True], sound()).out.split()


def test_the_pipeline_does_not_read_padding(folders, sound):
    """A batch of recordings of two lengths is as each alone."""
    asr = pipeline("automatic-speech-recognition", model=str(folders[False]))
    with torch.no_grad():
        asr.model.lm_head.weight.copy_(torch.randn(5, 32, generator=torch.manual_seed(1)))
    samples, rate = read_wav(sound())
    both = [{"raw": x, "sampling_rate": rate} for x in (samples, samples[: len(samples) // 3])]
    alone = [asr(dict(x))["text"] for x in both]
    assert [x["text"] for x in asr([dict(x) for x in both], batch_size=2)] == alone


@pytest.mark.parametrize("options", [(), ("--beam", 4), ("--stream",)])
def test_a_model_that_hears_nothing_says_so(command, folders, sound, tmp_path, options):
    shutil.copytree(folders[True], silent := tmp_path / "silent")
    model = TarnnForCTC.from_pretrained(silent)
    model.lm_head.weight.data.zero_()
    model.lm_head.bias.data.zero_()[model.config.pad_token_id] = 20
    model.save_pretrained(silent)
    assert "heard no letter" not in command("transcribe", folders[True], sound(), *options).err
    done = command("transcribe", silent, sound(), *options)
    assert (done.code, done.out) == (0, "\n")
    assert "heard no letter in" in done.err


@torch.no_grad()
@pytest.mark.parametrize("size", [160, 501, 4000, 20000])
def test_a_stream_is_the_whole(folders, sound, size):
    """Whatever the stretches that it comes in; and its state does not grow."""
    model, front, _ = open_speech(folders[True])
    samples, _ = read_wav(sound())
    whole = best_path(model(input_features=torch.from_numpy(front.frames(samples))[None]).logits[0].numpy())
    assert [i for ids in heard(model, front, samples, size) for i in ids] == whole


def test_a_stream_is_written(command, folders, sound):
    whole = command("transcribe", folders[True], sound())
    assert command("transcribe", folders[True], sound(), "--stream", "--chunk", 0.1) == whole


def test_what_is_refused(command, folders, sound, tmp_path):
    model = folders[False]
    assert command("transcribe", model, sound(rate=16000)).is_refusal("a.wav has 16,000 samples per second")
    assert command("transcribe", model, sound(SOUND[:50])).is_refusal("a.wav has 50 samples, less than one frame")
    assert command("transcribe", model, sound(), "--stream").is_refusal("sees both sides")
    assert command("transcribe", folders[True], sound(), "--stream", "--beam", 2).is_refusal("--beam", "--stream")
    assert command("transcribe", tmp_path, sound()).is_refusal("it has no config.json")
    assert command("transcribe", sound(), model).is_refusal("tarnn transcribe RUN FILE")
    assert command("transcribe", model, tmp_path / "b.wav").is_refusal("b.wav: no such file")
