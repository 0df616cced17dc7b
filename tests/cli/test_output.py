"""Text reaches stdout whole, a terminal unharmed."""

import io
import sys

import pytest

from tarnn.cli.output import Output


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture
def written(monkeypatch):
    """written(pieces, kind, encoding) → the bytes on stdout."""

    def run(pieces, kind=io.TextIOWrapper, encoding="utf-8"):
        stream = kind(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        out = Output()
        for piece in pieces:
            out.write(piece)
        out.end_line()
        monkeypatch.undo()
        return stream.buffer.getvalue()

    return run


def test_a_file_gets_the_text_as_it_is(written):
    assert written(["a\x1b[2J", "\té\r\n", "b"]) == "a\x1b[2J\té\r\nb".encode()


def test_a_terminal_is_not_steered_and_gets_its_line_end(written):
    text = written(["a\x1b[2J", "\té\x07\x9b\r\n", "b"], kind=Terminal).decode()
    assert text == r"a\x1b[2J" + "\té" + r"\x07\x9b\x0d" + "\nb\n"
    assert written(["b\n"], kind=Terminal) == b"b\n"


def test_an_encoding_that_lacks_a_character_gets_a_question_mark(written):
    assert written(["naïve 🙂"], encoding="latin-1") == b"na\xefve ?"
