"""Texts in the C interface: the tokens that the tokenizers library makes, and the draws of Python."""

import ctypes
import json
import random

import pytest
import torch
from support.c_library import BAD_ARGUMENT, BINARY, FAILED, MISSING, NO_TOKENIZER, Library, Refused, Sampling
from support.drawn_programs import VOCABULARY, drawn_program

from tarnn.data.tokenizers import amino_tokenizer, byte_tokenizer, train_bpe
from tarnn.decoding.byte_text import ByteTable
from tarnn.decoding.draws import Sampling as Way, row_sampler
from tarnn.decoding.packed_file import tokenizer_files, write_packed
from tarnn.decoding.prompt import prompt_ids
from tarnn.decoding.tokenizer import open_tokenizer
from tarnn.errors import UserError
from tarnn.kernels.cpu import library
from tarnn.program.outline import outline_of
from tarnn.program.packing import pack

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used"),
    pytest.mark.skipif(not BINARY.exists(), reason=MISSING),
]
LEARNT = "It's what we're told: they'll see 12 apples, or 345!\n\n  def f(x):\n\treturn x\u2019s \u00fcber \u65e5\u672c\u8a9e "
TEXTS = [
    "", " ", "  ", "\n", " a", "a  b", "a \n b ", "it's 'it' we'd I'LL", "x1 23 \u00bd\u0664", "\u00a0\u00a0a\u3000",
    "don't\u2019t", "<|endoftext|> is text", "\U0001f600\U0001f600 na\u00efve", "\u200b\u0301e\u0301", "aaaa" * 50,
    " " * 40 + "x",
]  # fmt: skip


def tokenizers():
    return {
        "bytes": byte_tokenizer,
        "amino acids": amino_tokenizer,
        "bpe": lambda: train_bpe([LEARNT.encode() * 20], 400),
    }


def packed(folder, tokenizer=None, **facts):
    """A drawn program in a file, with the tokenizer of that folder."""
    program = drawn_program(0)
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    write_packed(folder / "x.tarnn", pack(program, "float32"), {"outline": outline_of(program), **facts}, files)
    return folder / "x.tarnn"


@pytest.fixture(scope="module")
def c():
    return Library()


def both(c, folder, make):
    """A tokenizer as the library in C opens it, and as Python does."""
    make().save_pretrained(folder / "tokenizer")
    return c.made("open_tokenizer", c.open(packed(folder, folder / "tokenizer"))), open_tokenizer(folder / "tokenizer")


def agree(c, tokenizer, python, text, *, starts=False):
    try:
        expected = prompt_ids(python, text, len(python), starts=starts).tolist()
    except UserError:
        with pytest.raises(Refused) as error:
            c.encode(tokenizer, text, starts=starts)
        assert error.value.args[0] == BAD_ARGUMENT
        return
    assert c.encode(tokenizer, text, starts=starts) == expected


@pytest.mark.parametrize("kind", tokenizers())
def test_the_tokens_of_the_tokenizers_library(c, tmp_path, kind):
    tokenizer, python = both(c, tmp_path, tokenizers()[kind])
    chance = random.Random(0)
    drawn = ("".join(chance.choices(LEARNT + "ACDX\u00ad\u2028\r", k=chance.randint(1, 60))) for _ in range(200))
    for text in [*TEXTS, *drawn, "line of text\n\n  " * 9_000]:
        agree(c, tokenizer, python, text.encode())
        agree(c, tokenizer, python, text.encode(), starts=True)
    for wrong in (
        b"\xff",
        b"ab\xc3",
        b"\xed\xa0\x80",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe0\x80\x80",
        b"\xf0\x80\x80\x80",
    ):
        agree(c, tokenizer, python, wrong)
    table = ByteTable(python.backend_tokenizer)
    assert [c.bytes_of(tokenizer, i) for i in range(-1, len(python) + 1)] == [
        b"",
        *(table[i][0] for i in range(len(python))),
        b"",
    ]


def test_every_character_is_of_the_same_class(c, tmp_path):
    """Letters, digits, spaces and others, as they stand between each other, of all that Unicode has."""
    tokenizer, python = both(c, tmp_path, tokenizers()["bpe"])
    characters = [chr(i) for i in range(0x32400) if not 0xD800 <= i < 0xE000]
    agree(c, tokenizer, python, "".join(f"a{x}1{x}!{x} {x}" for x in characters).encode())


def test_a_beginning_and_added_tokens(c, tmp_path):
    """A token before each text; and names of tokens that are no bytes of a byte-level tokenizer."""
    from support.open_folders import byte_level

    tokenizer, python = both(c, tmp_path, lambda: byte_level(begins=True))
    agree(c, tokenizer, python, b"Call me", starts=True)
    agree(c, tokenizer, python, b"", starts=True)
    assert c.encode(tokenizer, b"", starts=True) == [256]


def other(change):
    def make():
        tokenizer = train_bpe([LEARNT.encode() * 20], 300)
        change(tokenizer)
        return tokenizer

    return make


def test_other_tokenizers_are_refused_by_name(c, tmp_path):
    from tokenizers import decoders, normalizers, pre_tokenizers

    for i, (name, value, words) in enumerate(
        (
            ("normalizer", normalizers.NFC(), "a normalizer, NFC"),
            ("pre_tokenizer", pre_tokenizers.Metaspace(), "its pre-tokenizer is Metaspace"),
            ("decoder", decoders.Metaspace(), "its decoder is Metaspace"),
        )
    ):
        (tmp_path / str(i)).mkdir()
        make = other(lambda x, name=name, value=value: setattr(x.backend_tokenizer, name, value))
        refused(c, tmp_path / str(i), make, words)
    refused(c, tmp_path, other(lambda x: x.add_tokens(["<think>"])), "the added token <think>")
    with pytest.raises(Refused, match="has no tokenizer") as error:
        c.made("open_tokenizer", c.open(packed(tmp_path)))
    assert error.value.args[0] == NO_TOKENIZER


def refused(c, folder, make, words):
    make().save_pretrained(folder / "tokenizer")
    with pytest.raises(Refused) as error:
        c.made("open_tokenizer", c.open(packed(folder, folder / "tokenizer")))
    assert error.value.args[0] == NO_TOKENIZER
    assert words in error.value.args[1]


def test_damaged_tokenizers_are_refused_or_read(c, tmp_path):
    train_bpe([LEARNT.encode() * 20], 300).save_pretrained(tmp_path / "tokenizer")
    file, chance, count = tmp_path / "tokenizer/tokenizer.json", random.Random(0), 0
    whole = json.dumps(json.loads(file.read_text())).encode()
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(2):
            data[chance.randrange(len(data))] = chance.randrange(32, 127)
        file.write_bytes(data)
        try:
            tokenizer = c.made("open_tokenizer", c.open(packed(tmp_path, tmp_path / "tokenizer")))
            c.encode(tokenizer, LEARNT.encode())
        except Refused as error:
            assert error.args[0] == NO_TOKENIZER  # noqa: PT017
            count += 1
    assert count > 20


def test_draws_are_those_of_python(c, tmp_path):
    program = c.open(packed(tmp_path))
    p, generator = c.c.tarnn_num_outputs(program), torch.Generator().manual_seed(0)
    chance = random.Random(0)
    for seed in range(60):
        way = Way(
            chance.choice((0.0, 0.7, 1.0)), chance.choice((0, 3)), chance.choice((1.0, 0.8)), chance.choice((0.0, 0.1))
        )
        draw = row_sampler(way, p, seed=seed)
        for position in range(5):
            logits = 3 * torch.randn(1, p, generator=generator)
            options = Sampling(way.temperature, way.top_p, way.min_p, way.top_k, seed)
            assert c.draw(program, options, position, logits) == int(draw(logits))


def test_sampling_that_can_not_be(c, tmp_path):
    program = c.open(packed(tmp_path))
    logits = torch.zeros(c.c.tarnn_num_outputs(program))
    for wrong in (
        (-1, 1, 0, 0, 0),
        (1, 0, 0, 0, 0),
        (1, 1.5, 0, 0, 0),
        (1, 1, 2, 0, 0),
        (1, 1, 0, -1, 0),
        (float("nan"), 1, 0, 0, 0),
    ):
        with pytest.raises(Refused) as error:
            c.draw(program, Sampling(*wrong), 0, logits)
        assert error.value.args[0] == BAD_ARGUMENT
    with pytest.raises(Refused, match="no distribution") as error:
        c.draw(program, Sampling(1, 1, 0, 0, 0), 0, logits * float("nan"))
    assert error.value.args[0] == FAILED


def test_what_the_makers_say(c, tmp_path):
    says = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0}
    program = c.open(packed(tmp_path, end_ids=[3, VOCABULARY - 1], sampling=says))
    x = Sampling()
    c.c.tarnn_default_sampling(program, ctypes.byref(x))
    assert (x.temperature, x.top_p, x.min_p, x.top_k, x.seed) == (0.6, 0.9, 0.0, 20, 0)
    assert [i for i in range(VOCABULARY) if c.c.tarnn_is_end(program, ctypes.c_int64(i))] == [3, VOCABULARY - 1]


def test_a_packed_file_in_memory(c, tmp_path):
    path = packed(tmp_path)
    data = path.read_bytes()
    room = ctypes.create_string_buffer(len(data) + 64)
    at = (ctypes.addressof(room) + 63) // 64 * 64
    ctypes.memmove(at, data, len(data))
    program = c.made("open_bytes", ctypes.c_void_p(at), ctypes.c_size_t(len(data)))
    p = c.c.tarnn_num_outputs(program)
    assert torch.equal(c.read(c.new(program, 1), [[1, 2, 3]], p), c.read(c.new(c.open(path), 1), [[1, 2, 3]], p))
    with pytest.raises(Refused, match=r"cut short|damaged"):
        c.made("open_bytes", ctypes.c_void_p(at), ctypes.c_size_t(len(data) // 2))
