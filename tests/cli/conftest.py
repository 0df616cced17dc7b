"""The command run in this process: a tiny run of `tarnn train`, tiny checkpoints for the others."""

import random
from typing import NamedTuple

import pytest
import torch
import transformers as hf
from transformers.utils import logging

from tarnn.cli import progress
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.models import TarnnConfig, TarnnForCausalLM

TINY = [
    "--hidden-size", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch-size", "2", "--steps", "12",
    "--eval-every", "4", "--save-every", "4", "--sample-tokens", "4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """No line because something takes long: on a busy machine everything does."""
    monkeypatch.setattr(progress, "QUIET", 1e6)
    monkeypatch.setattr("tarnn.log.FIRST", 1e6)


@pytest.fixture
def text(tmp_path):
    """A few thousand bytes that a model can learn something of."""
    words = random.Random(0)
    path = tmp_path / "text.txt"
    path.write_text("".join(words.choice(["the cat ", "a hat ", "sat on ", "the mat.\n"]) for _ in range(500)))
    return path


@pytest.fixture
def llama(tmp_path):
    """The folder of an untrained softmax model of bytes."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def train(tarnn, text, tmp_path):
    """train(*options) → (exit code, stdout, stderr) of a tiny run on `text` into tmp_path/run.

    A later option wins over an earlier one, so that a test names only what it is about.
    """

    def run(*options, source=text, out=tmp_path / "run", tiny=True):
        return tarnn("train", source, "--out", out, *(TINY if tiny else ()), *options)

    return run


@pytest.fixture
def refused(train):
    """refused(*options, …) → the sentence on stderr, after checking that it is one and that the code is 2."""

    def run(*options, **kwargs):
        code, out, err = train(*options, **kwargs)
        assert code == 2, (out, err)
        assert "Traceback" not in err + out
        sentences = [line for line in err.splitlines() if line.startswith("tarnn: error: ")]
        assert len(sentences) == 1, err
        assert err.rstrip().endswith(sentences[0])
        return sentences[0].removeprefix("tarnn: error: ")

    return run


KINDS = {
    "linear": {},
    "softmax": {"attention": "softmax"},
    "hybrid": {"attention": ["linear", "softmax"]},
    "single": {"num_hidden_layers": 1},
    "random": {"feature_map": "favor", "feature_map_options": {"favor": {"num_features": 24}}},
    "learned": {"position": "learned", "max_position_embeddings": 48},
}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def is_refusal(self, *words):
        """Exit code 2, nothing on stdout, one sentence at the end of stderr, with all `words`; no traceback."""
        assert (self.code, self.out) == (2, ""), self
        assert "Traceback" not in self.err
        sentence = self.err.splitlines()[-1]
        assert sentence.startswith("tarnn: error: "), self.err
        for word in words:
            assert str(word) in sentence, (word, sentence)
        return True


@pytest.fixture
def command(tarnn):
    """command(*argv) → Outcome, in this process."""
    return lambda *argv: Outcome(*tarnn(*argv))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folders of untrained byte-level models, by kind of attention."""
    logging.disable_progress_bar()
    folders = {}
    for kind, options in KINDS.items():
        torch.manual_seed(0)
        folders[kind] = folder = tmp_path_factory.mktemp(kind)
        config = TarnnConfig(
            hidden_size=32,
            num_attention_heads=4,
            initializer_range=0.3,
            bos_token_id=256,
            eos_token_id=256,
            pad_token_id=256,
            **{"num_hidden_layers": 2, **options},
        )
        TarnnForCausalLM(config).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    return folders
