"""The table of bytes says what the tokenizer's own decode says, token by token, and never more than is certain."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from tarnn.data.tokenizers import byte_tokenizer, train_bpe
from tarnn.decoding.byte_text import ByteTable
from tarnn.decoding.streaming import KEEP, ByteDecoder, StreamingDecoder, TextStream, decoder

CORPUS = "naïve cafés: 日本語の文字, 🙂🙃 and e\u0301, \ufffd. The quick brown fox. " * 20


def with_added_tokens():
    """Special and plain tokens beside those of the BPE: some written in characters that stand for bytes, some not."""
    tokenizer = train_bpe([CORPUS.encode()], 340)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "日"]})
    tokenizer.add_tokens([AddedToken("two words"), AddedToken("é"), AddedToken("🙂 tail", normalized=False)])
    return tokenizer


TOKENIZERS = {"bytes": byte_tokenizer(), "bpe": train_bpe([CORPUS.encode()], 340), "added": with_added_tokens()}
BEYOND = 330  # the last ids have no token, as those of a vocabulary that was rounded up


def whole(tokenizer, ids):
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(ids=st.lists(st.integers(0, BEYOND), max_size=80))
def test_any_tokens_give_the_text_of_the_tokenizer_itself(name, ids):
    table = decoder(TOKENIZERS[name])
    assert isinstance(table, ByteTable)
    stream = ByteDecoder(table)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == table(ids) == whole(TOKENIZERS[name], ids)
    assert stream.recent == ids[-KEEP:]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(max_size=60), before=st.text(max_size=20), cut=st.integers(0, 200))
def test_a_text_comes_out_as_from_the_decoder_of_all_tokenizers(name, text, before, cut):
    """Piece by piece, after a context that may end in the middle of a character."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.backend_tokenizer.encode(before + text, add_special_tokens=False).ids
    context, ids = ids[:cut], ids[cut:]
    fast = ByteDecoder(decoder(tokenizer), context)
    slow = StreamingDecoder(lambda ids: whole(tokenizer, ids), context)
    pieces = [(fast.push(token), slow.push(token)) for token in ids]
    ends = fast.finish(), slow.finish()
    assert whole(tokenizer, context + ids).endswith("".join(a for a, _ in pieces) + ends[0])
    if "\ufffd" not in whole(tokenizer, context + ids):  # which the other holds back for a while
        assert all(a == b for a, b in [*pieces, ends])


def test_added_tokens_mean_what_they_say():
    tokenizer = TOKENIZERS["added"]
    ids = tokenizer.convert_tokens_to_ids(["two words", "<|user|>", "🙂 tail", "日"])
    assert decoder(tokenizer)(ids) == whole(tokenizer, ids) == "two words🙂 tail"


def test_the_prompts_own_characters_are_not_told_again():
    """Bytes that are no text, at the prompt's end, are the prompt's."""
    table = decoder(byte_tokenizer())
    stream = ByteDecoder(table, context=[0x41, 0xFF])
    assert [stream.push(ord("b")), stream.finish()] == ["b", ""]
    stream = ByteDecoder(table, context=[0xE2, 0x82])
    assert [stream.push(0xAC), stream.finish()] == ["€", ""]


def test_a_special_token_in_the_middle_of_a_character_leaves_it_whole():
    tokenizer = byte_tokenizer()
    stream = ByteDecoder(decoder(tokenizer))
    assert [stream.push(byte) for byte in (0xE2, *[256] * 50, 0x82, 0xAC)] == [""] * 52 + ["€"]


def test_a_tokenizer_of_another_kind_is_decoded_by_itself():
    backend = Tokenizer(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.Metaspace()

    class Other:
        backend_tokenizer = backend

    decode = decoder(Other())
    assert not isinstance(decode, ByteTable)
    stream = TextStream(decode, context=[1])
    stream.push(0)
    assert stream.take() == " a"
