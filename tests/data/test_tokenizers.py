"""Ids are bytes, or stand for known bytes; nothing is lost on the way there and back."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from tarnn.data import byte_tokenizer, decode_bytes, encode, token_bytes, train_bpe
from tarnn.data.tokenizers import PIECE, amino_tokenizer, ids_of_bytes
from tarnn.errors import UserError

TEXT = "Straße, 東京, naïve: " + "the cat and the hat and the bat. " * 40


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT.encode()], 280)


BYTES = byte_tokenizer()


@given(st.text())
def test_ids_are_the_bytes_of_the_text(text):
    ids = BYTES(text, split_special_tokens=True).input_ids
    assert bytes(ids) == text.encode()
    assert BYTES.decode(ids) == text


@given(st.binary())
def test_any_bytes_go_in_and_come_out(data):
    ids = encode(BYTES, data)
    assert ids.tolist() == list(data)
    assert decode_bytes(BYTES, ids.tolist()) == data


def test_end_of_text_is_256_and_all_that_is_special():
    assert (BYTES.eos_token_id, BYTES.pad_token_id, BYTES.bos_token_id, len(BYTES)) == (256, 256, 256, 257)
    assert BYTES("a<|endoftext|>").input_ids == [97, 256]  # in a prompt
    assert 256 not in encode(BYTES, b"a<|endoftext|>")  # in a text to train on
    assert BYTES.decode([97, 256], skip_special_tokens=True) == "a"
    assert token_bytes(BYTES) == [bytes([i]) for i in range(256)] + [b""]
    assert ids_of_bytes(BYTES).tolist() == [*range(256)]


def test_padding_is_on_the_left():
    batch = BYTES(["ab", "c"], padding=True)
    assert batch.input_ids == [[97, 98], [256, 99]]
    assert batch.attention_mask == [[1, 1], [0, 1]]


def test_a_tokenizer_is_the_same_after_saving(tmp_path, bpe):
    for tokenizer in (BYTES, bpe):
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids
        assert (loaded.eos_token_id, loaded.padding_side) == (tokenizer.eos_token_id, "left")
        assert (ids_of_bytes(loaded) is not None) == (tokenizer is BYTES)


@given(text=st.text())
def test_bpe_stands_for_exact_bytes(bpe, text):
    ids = encode(bpe, text.encode())
    assert decode_bytes(bpe, ids.tolist()) == text.encode()
    assert ids.dtype == np.int64


def test_bpe_merges_ends_with_the_separator_and_is_deterministic(bpe):
    assert len(bpe) == 280
    assert bpe.eos_token_id == 279
    assert len(encode(bpe, TEXT.encode())) < len(TEXT.encode()) / 2
    again = train_bpe([TEXT.encode()], 280)
    assert again.get_vocab() == bpe.get_vocab()
    assert ids_of_bytes(bpe) is None
    assert 279 not in encode(bpe, b"a<|endoftext|>")
    assert bpe("a<|endoftext|>").input_ids[-1] == 279  # encode left the tokenizer as it was


def test_a_long_text_is_cut_at_line_ends_without_a_loss(bpe):
    data = ("é" * 37 + "\n").encode() * (3 * PIECE // 75)
    assert decode_bytes(bpe, encode(bpe, data).tolist()) == data


def test_what_bpe_refuses(bpe):
    with pytest.raises(UserError, match=r"notes is not UTF-8: byte 0xff at position 70,001.*--tokenizer bytes"):
        encode(bpe, b"a" * 70_000 + b"\n\xff", "notes")
    with pytest.raises(UserError, match="vocabulary of 257 leaves nothing to merge; expected at least 258"):
        train_bpe([b"abc"], 257)


def test_amino_acids(tmp_path):
    tokenizer = amino_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert encode(one, b"ACYBX").tolist() == [0, 1, 19, 20, 24] == one("ACYBX").input_ids
        assert decode_bytes(one, [0, 1, 19, 26, 24, 27]) == b"ACYX"
        assert (one.eos_token_id, one.pad_token_id, one.mask_token_id, len(one)) == (26, 26, 27, 28)
        assert one("A<|mask|>D").input_ids == [0, 27, 2]
        assert one("AéD").input_ids == [0, 24, 24, 2]  # in a prompt, X: any
    with pytest.raises(UserError, match=r"the text has b'\*' at position 2, .* expected ACDEFGHIKLMNPQRSTVWYBJOUXZ\."):
        encode(tokenizer, b"AC*")
