"""tarnn-run: the text of `tarnn generate`, without Python."""

import re
import subprocess

import pytest
import torch
from support.c_library import RUN
from support.open_folders import make_folder

import tarnn
from tarnn.data.tokenizers import byte_tokenizer, train_bpe
from tarnn.decoding.pack import pack_folder
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used"),
    pytest.mark.skipif(not RUN.exists(), reason="there is no tarnn-run beside the compiled kernels"),
]
LEARNT = "Call me Ishmael. Some years ago, never mind how long, it's said: 12 \u65e5\u672c\n"


def make_own(folder, tokenizer):
    """A folder of ours with random weights, whose texts vary."""
    torch.manual_seed(0)
    config = TarnnConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = TarnnForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 20
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def file(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_own(folder / "own", byte_tokenizer() if request.param == "bytes" else train_bpe([LEARNT.encode() * 9], 300))
    pack_folder(folder / "own", folder / "x.tarnn", "int8")
    return folder / "x.tarnn"


def run(*words, stdin=b""):
    done = subprocess.run([RUN, *map(str, words)], input=stdin, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def text_of(file, prompt, **options):
    return "".join(tarnn.load(file).generate(prompt, max_new_tokens=60, **options))


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"seed": 7}, {"seed": 8, "top_k": 5, "temperature": 0.7}, {"seed": 9, "top_p": 0.8}]
)
def test_the_text_of_generate(file, options):
    """Greedy and drawn; from an argument, a pipe, and nothing."""
    words = [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", value)]
    texts = set()
    for prompt in ("Call me", "it's 12 \u65e5", ""):
        expected = text_of(file, prompt, **options)
        for given, stdin in ((["--", prompt], b""), ([], prompt.encode())):
            got = run(file, "--max-new-tokens", 60, *words, *given, stdin=stdin)
            assert got.decode("utf-8", "replace") == expected
        texts.add(expected)
    assert len(texts) == 3


def test_a_state_goes_on(file, tmp_path):
    whole = run(file, "Call me", "--greedy", "--max-new-tokens", 30)
    first = run(file, "Call me", "--greedy", "--max-new-tokens", 12, "--state-out", tmp_path / "s")
    assert first + run(file, "--state-in", tmp_path / "s", "--greedy", "--max-new-tokens", 18) == whole
    more = run(file, " Ishmael", "--state-in", tmp_path / "s", "--greedy", "--max-new-tokens", 9)
    assert more != whole[len(first) :][: len(more)] or not more
    run(file, "Call me", "--max-new-tokens", 0, "--state-out", tmp_path / "t")
    assert run(file, "--state-in", tmp_path / "t", "--greedy", "--max-new-tokens", 30) == whole


@pytest.mark.parametrize("family", ["Llama", "Qwen3.5"])
def test_models_of_others_by_ids(tmp_path, family):
    """Tokens as numbers, for a model whose tokenizer need not be read here."""
    pack_folder(make_folder(tmp_path / "folder", family), tmp_path / "x.tarnn", "float32")
    ids = [3, 1, 4, 1, 5, 9]
    writing = tarnn.load(tmp_path / "x.tarnn").generate(ids, max_new_tokens=40, temperature=0)
    "".join(writing)
    for threads in (1, 2):
        got = run(
            tmp_path / "x.tarnn",
            "--ids",
            "--greedy",
            "--max-new-tokens",
            40,
            "--threads",
            threads,
            stdin=b"3 1 4\n1,5 9",
        )
        assert [int(x) for x in got.split()] == writing.ids


def test_what_it_refuses(file, tmp_path):
    def refused(words, *given, stdin=b""):
        done = subprocess.run([RUN, *map(str, given)], input=stdin, capture_output=True, timeout=60)
        assert done.returncode == 1
        assert re.search(words, done.stderr.decode()), done.stderr.decode()

    refused("name a packed model")
    refused("there is no option --length", file, "--length", 3)
    refused("--seed takes a number from 0 on; got '-3'", file, "--seed", -3)
    refused("--top-k takes a value", file, "--top-k")
    refused("more words than a model and a prompt", file, "Call", "me")
    refused("No such file", tmp_path / "missing", "Call me")
    refused("top_p must be above 0", file, "Call me", "--top-p", 2)
    refused("threads are from 1 to", file, "Call me", "--threads", 0)
    refused("no state that tarnn-run saved", file, "--state-in", "/dev/null")
    refused("a token must be from 0 to", file, "--ids", "99999")
    refused("--ids takes a number from 0 on; got 'me'", file, "--ids", "me")
    refused("can't be written", file, "Call me", "--max-new-tokens", 1, "--state-out", tmp_path / "no" / "s")
    (tmp_path / "newer").write_bytes(file.read_bytes().replace(b'"format_version": "2"', b'"format_version": "9"'))
    refused("has version 9 of packed files; this library reads version 2", tmp_path / "newer", "Call me")
    (tmp_path / "state").write_bytes(b"x" * 200)
    refused("no saved state", file, "--state-in", tmp_path / "state")
