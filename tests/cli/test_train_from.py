"""`tarnn train --from RUN`, `--tokenizer FOLDER`, `--device` and `--threads`."""

import json

import pytest
import torch

from tarnn.models import TarnnForCausalLM
from tarnn.tasks import TextTask


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("another text, with other words in it\n" * 60)
    return path


SHORT = ("--context", 16, "--batch-size", 2, "--steps", 4, "--eval-every", 4, "--save-every", 4, "--sample-tokens", 0)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_it_goes_on_from_the_weights_of_a_run(tokenizer, train, tarnn, other, tmp_path, monkeypatch):
    assert train("--tokenizer", tokenizer, "--decay", "head")[0] == 0
    run, out = tmp_path / "run", tmp_path / "on"
    before = TarnnForCausalLM.from_pretrained(run)
    started, model_of = [], TextTask.model

    def model(task):
        made = model_of(task)
        started.append({name: x.clone() for name, x in made.state_dict().items()})
        return made

    monkeypatch.setattr(TextTask, "model", model)
    code, _, err = tarnn("train", other, "--out", out, "--from", run, *SHORT)
    assert code == 0, err
    assert all(torch.equal(started[0][name], x) for name, x in before.state_dict().items())
    after = TarnnForCausalLM.from_pretrained(out)
    assert (after.config.decay, after.config.hidden_size) == ("head", 32)
    assert after.config.vocab_size == before.config.vocab_size
    assert (out / "tokenizer.json").read_text() == (run / "tokenizer.json").read_text()
    assert not all(torch.equal(x, y) for x, y in zip(before.parameters(), after.parameters()))
    assert json.loads((out / "settings.json").read_text())["settings"]["start"] == str(run)
    assert tarnn("train", other, "--out", out, "--from", run, *SHORT, "--resume", "--steps", 8)[0] == 0
    assert tarnn("eval", out)[0] == 0


def test_what_from_refuses(train, refused, llama, tmp_path):
    assert train()[0] == 0
    run, there = tmp_path / "run", {"out": tmp_path / "on", "tiny": False}
    assert "--hidden-size does not go with --from" in refused("--from", run, "--hidden-size", 64, **there)
    assert "--tokenizer does not go with --from" in refused("--from", run, "--tokenizer", "bpe:300", **there)
    assert "gone holds no checkpoint: it has no config.json" in refused("--from", tmp_path / "gone", **there)
    said = refused("--from", run, "--task", "masked-lm", **there)
    assert "of another task; expected one of --task masked-lm" in said
    assert "holds a 'llama' model, which `tarnn train` can't train" in refused("--from", llama, **there)
    assert "--from is for --task text" in refused("--from", run, "--task", "classification", **there)


def test_the_tokenizer_of_a_folder(train, refused, tmp_path):
    assert train("--tokenizer", "bpe:270")[0] == 0
    out = tmp_path / "on"
    code, _, err = train("--tokenizer", tmp_path / "run", out=out)
    assert code == 0, err
    assert (out / "tokenizer.json").read_text() == (tmp_path / "run" / "tokenizer.json").read_text()
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "日本": 1, "[UNK]": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    said = refused("--tokenizer", tmp_path / "words", out=tmp_path / "no")
    assert "words is not byte-level" in said


def test_device_and_threads(train, refused, tmp_path):
    code, _, err = train("--threads", 1, "--device", "cpu")
    assert code == 0
    assert "cpu, 1 thread\n" in err
    if not torch.cuda.is_available():
        said = refused("--device", "cuda", out=tmp_path / "no")
        assert "--device cuda can't be used here; expected auto or cpu" in said
    assert "--threads 0 is not possible" in refused("--threads", 0, out=tmp_path / "no")
