"""Text comes out whole characters at a time, nothing is lost, and nothing past a stop string is shown."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from tarnn.decoding.streaming import KEEP, TRIM, StopStrings, StreamingDecoder, TextStream


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", "replace")


def decode_with_byte_fallback(ids):
    """One U+FFFD for each byte of an incomplete character, as tokenizers' ByteFallback does."""
    data, text = bytes(ids), ""
    while data:
        length = next((n for n in (1, 2, 3, 4) if is_character(data[:n])), None)
        text, data = text + (data[:length].decode() if length else "\ufffd"), data[length or 1 :]
    return text


def is_character(data):
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


DECODERS = pytest.mark.parametrize("decode", [decode_bytes, decode_with_byte_fallback])


@DECODERS
@given(text=st.text(max_size=3 * TRIM))
def test_the_pieces_add_up_and_none_holds_half_a_character(decode, text):
    stream = StreamingDecoder(decode)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@DECODERS
@given(data=st.binary(max_size=4 * TRIM))
def test_bytes_that_are_no_text_come_out_as_the_whole_decodes(decode, data):
    stream = StreamingDecoder(decode)
    assert "".join(stream.push(byte) for byte in data) + stream.finish() == decode(list(data))


def test_the_window_stays_small_and_invalid_bytes_are_not_held_for_ever():
    lengths = []

    def decode(ids):
        lengths.append(len(ids))
        return decode_bytes(ids)

    stream = StreamingDecoder(decode)
    out = "".join(stream.push(0xFF) for _ in range(1000))
    assert len(out) == 997
    assert max(lengths) <= TRIM
    assert out + stream.finish() == "\ufffd" * 1000


def test_the_prompt_gives_context_for_a_leading_space_and_a_split_character():
    words = {1: "▁Call", 2: "▁me", 3: "▁Ishmael"}

    def decode(ids):
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert StreamingDecoder(decode, context=[1, 2]).push(3) == " Ishmael"
    first, second = "é".encode()
    assert StreamingDecoder(decode_bytes, context=[*b"caf", first]).push(second) == "é"
    assert StreamingDecoder(decode_bytes, context=list(b"x" * 5 * KEEP)).push(ord("y")) == "y"


@given(
    text=st.text("abE", max_size=40),
    stops=st.lists(st.text("abE", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=10),
)
def test_stop_strings_cut_at_the_first_that_is_complete(text, stops, cuts):
    stop, out = StopStrings(stops), ""
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    for a, b in pairwise(edges):
        out += stop.push(text[a:b])
        assert not any(s in out for s in stops)
    out += stop.finish()
    assert text.startswith(out)
    if any(s in text for s in stops):
        assert stop.stopped
        assert any(text[len(out) :].startswith(s) for s in stops)
    else:
        assert not stop.stopped
        assert out == text


def test_text_that_cannot_become_a_stop_string_is_given_at_once():
    stop = StopStrings(["\n\n"])
    assert stop.push("one line\n") == "one line"
    assert stop.push("two") == "\ntwo"


def text_of(stream, tokens, **options):
    for token in tokens:
        stream.push(token, ends={0})
    stream.finish("no more", **options)
    return stream.take()


def test_a_text_ends_at_the_first_end_token_or_stop_string():
    stream = TextStream(decode_bytes, stop=["XY"])
    assert text_of(stream, b"one X\x00 two") == "one X"
    assert stream.over == "the text is at its end"
    stream = TextStream(decode_bytes, stop=["XY"])
    assert text_of(stream, b"one XY two\x00") == "one "
    assert stream.over == "a stop string was met"
    stream = TextStream(decode_bytes, stop=["XY"])
    assert text_of(stream, b"one X") == "one X"
    assert stream.over == "no more"


@given(text=st.text(min_size=1, max_size=30), cut=st.integers(0, 120))
def test_a_text_that_goes_on_is_cut_between_characters_and_loses_none(text, cut):
    data = text.replace("\0", "0").encode()
    first = TextStream(decode_bytes, context=b"before")
    head = text_of(first, data[:cut], goes_on=True)
    tail = text_of(TextStream(decode_bytes, context=first.recent), data[cut:])
    assert head + tail == data.decode()
    assert "\ufffd" not in head or "\ufffd" in text
