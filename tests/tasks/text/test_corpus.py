"""Text to ids on disk: the split, the separators, the digest, and the exact count of bytes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tarnn.data import Document, decode_bytes
from tarnn.errors import UserError
from tarnn.tasks.text.corpus import VALIDATION_LIMIT, Digest, cut_before, load, prepare

DOCUMENTS = [Document("one", b"abcdef"), Document("two", b""), Document("three", b"ghij\xff")]


def ids(array):
    return array.tolist()


def test_documents_end_with_a_separator_and_the_end_is_held_out(tmp_path):
    corpus = prepare(iter(DOCUMENTS), tmp_path / "data", validation_fraction=0.27)  # 3 of 11 bytes
    assert ids(corpus.train) == [*b"abcdef", 256, *b"gh"]  # cut in the middle of a document: it goes on
    assert ids(corpus.validation) == [*b"ij\xff", 256]
    assert corpus.train.dtype == np.uint16
    assert corpus.facts["train"] == {"documents": 2, "bytes": 8, "tokens": 9}
    assert corpus.facts["validation"] == {"documents": 1, "bytes": 3, "tokens": 4}
    assert corpus.bytes_per_token == 8 / 9
    assert corpus.bytes_per_id.tolist() == [1] * 256 + [0]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=4), fraction=st.floats(0, 0.9))
def test_both_parts_together_are_the_text(tmp_path_factory, texts, fraction):
    documents = [Document("", text.encode()) for text in texts]
    corpus = prepare(documents, tmp_path_factory.mktemp("c") / "data", validation_fraction=fraction)
    whole = b"".join(document.data for document in documents)
    parts = [decode_bytes(corpus.tokenizer, ids(part)) for part in (corpus.train, corpus.validation)]
    assert b"".join(parts) == whole
    assert abs(len(parts[1]) - fraction * len(whole)) <= 4
    for part in parts:
        part.decode()  # no character was cut in two


def test_a_text_of_its_own_for_validation(tmp_path):
    corpus = prepare(DOCUMENTS[:1], tmp_path / "data", validation_documents=[Document("v", b"xyz")])
    assert (ids(corpus.train), ids(corpus.validation)) == ([*b"abcdef", 256], [*b"xyz", 256])


def test_without_being_asked_a_tenth_is_held_out_but_never_much():
    assert cut_before(np.zeros(1000, np.uint8), None) == 900
    assert cut_before(np.zeros(10**7, np.uint8), None) == 10**7 - VALIDATION_LIMIT


def test_bpe_learns_from_the_training_part_only(tmp_path):
    document = Document("d", b"ab " * 300 + b"zq " * 300)
    corpus = prepare([document], tmp_path / "data", tokenizer="bpe:270", validation_fraction=0.5)
    vocabulary = corpus.tokenizer.get_vocab()
    assert "ab" in vocabulary
    assert "zq" not in vocabulary
    assert decode_bytes(corpus.tokenizer, ids(corpus.validation)) == b"zq " * 300
    assert corpus.facts["train"]["bytes"] == 900


def test_what_was_written_is_loaded_and_only_when_whole(tmp_path, monkeypatch):
    written = prepare(DOCUMENTS, tmp_path / "data")
    loaded = load(tmp_path / "data")
    assert ids(loaded.train) == ids(written.train)
    assert loaded.facts == written.facts

    def interrupted():
        yield DOCUMENTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(interrupted(), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert ids(prepare(DOCUMENTS, tmp_path / "other").train) == ids(written.train)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "other"}


def test_the_digest_knows_where_documents_end():
    def digest(*texts):
        return Digest([Document("", text) for text in texts]).hex()

    assert digest(b"ab", b"c") == digest(b"ab", b"c")
    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abd"), digest(b"abc", b"")}) == 5


def test_what_cannot_be_prepared(tmp_path):
    with pytest.raises(UserError, match="there is no text: all documents are empty"):
        prepare([Document("e", b"")], tmp_path / "data")
    with pytest.raises(UserError, match="no tokenizer is called 'words'; expected 'bytes', 'amino-acids', 'bpe:N'"):
        prepare(DOCUMENTS, tmp_path / "data", tokenizer="words")
    with pytest.raises(UserError, match=r"three is not UTF-8: byte 0xff at position 4"):
        prepare(DOCUMENTS, tmp_path / "data", tokenizer="bpe:300")
