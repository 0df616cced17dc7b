"""Compressed text is read as what it holds; what is not text is named, and never trained on in silence."""

import bz2
import gzip
import json
import lzma
import sys
import zlib

import numpy as np
import pytest

from tarnn.data import read_documents
from tarnn.errors import UserError

NOVEL = b"It was the best of times, it was the worst of times.\n" * 50


def zstd(data):
    return pytest.importorskip("zstandard").compress(data)


WAYS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def read(*sources):
    told = []
    return [document.data for document in read_documents([str(s) for s in sources], log=told.append)], told


@pytest.mark.parametrize("suffix", WAYS)
def test_a_compressed_file_is_what_it_holds(tmp_path, suffix):
    """Whatever it is called, alone and in a folder, and with lines of JSON in it."""
    rows = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(3))
    (tmp_path / f"a.txt{suffix}").write_bytes(WAYS[suffix](NOVEL))
    (tmp_path / f"b.jsonl{suffix}").write_bytes(WAYS[suffix](rows))
    (tmp_path / "c").write_bytes(WAYS[suffix](NOVEL[:53]))
    every = [NOVEL, b"row 0", b"row 1", b"row 2", NOVEL[:53]]
    assert read(tmp_path) == (every, [])
    assert read(tmp_path / f"a.txt{suffix}")[0] == [NOVEL]
    assert read(tmp_path / f"b.jsonl{suffix}")[0] == every[1:4]


@pytest.mark.parametrize("suffix", WAYS)
def test_a_damaged_one_is_refused(tmp_path, suffix):
    whole = WAYS[suffix](np.random.default_rng(0).integers(97, 123, 5000).astype(np.uint8).tobytes())
    path = tmp_path / f"a{suffix}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"a{suffix} can't be decompressed .* Take an intact copy"):
        read(path)


def test_zstd_needs_its_package(tmp_path, monkeypatch):
    (tmp_path / "a.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match=r"a\.zst needs zstandard: pip install .tarnn\[train\]"):
        read(tmp_path / "a.zst")


BINARIES = {
    "a.png": (b"\x89PNG\r\n\x1a\n" + bytes(3) + b"x" * 20, "binary data"),
    "b.jpg": (b"\xff\xd8\xff\xe0" + bytes(3) + b"x" * 20, "binary data"),
    "c.pdf": (b"%PDF-1.7\n" + b"x" * 20, "a PDF document"),
    "d.npz": (b"PK\x03\x04" + bytes(3) + b"x" * 20, "binary data"),
    "e.bin": (b"text at first" + bytes(8), "binary data"),
    "f.txt": ("é wide".encode("utf-16"), "UTF-16"),
    "g.tar.gz": (gzip.compress(b"name\0\0\0" + NOVEL), "binary data"),
}


def test_what_is_not_text_is_refused_by_name_and_left_out_of_a_folder(tmp_path):
    for name, (data, what) in BINARIES.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"{name} is not text but .*{what}.*; expected text.*pipe it"):
            read(tmp_path / name)
    with pytest.raises(UserError, match="has no files with text in them"):
        read(tmp_path)
    (tmp_path / "README").write_bytes(b"caf\xe9, in Latin-1")
    texts, told = read(tmp_path)
    assert texts == [b"caf\xe9, in Latin-1"]
    assert told == [f"left out: 7 files of folder {tmp_path} that are not text: a.png, b.jpg, c.pdf …"]
    assert read(tmp_path / "[Re]*")[1] == [f"left out: a file of glob '{tmp_path}/[Re]*' that is not text: e.bin"]


def test_json_nested_too_deeply_is_one_sentence(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n' + "[" * 100_000 + "]" * 100_000 + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 is not JSON \(.*recursion.*\); a \.jsonl file"):
        read(path)


def test_a_stream_that_ends_in_the_middle_of_the_lines(tmp_path):
    rows = gzip.compress(b'{"text": "one"}\n' * 5000)
    (tmp_path / "rows.jsonl.gz").write_bytes(rows[:-20])
    with pytest.raises(UserError, match=r"rows\.jsonl\.gz can't be decompressed as gzip"):
        read(tmp_path / "rows.jsonl.gz")
    (tmp_path / "rows.jsonl.gz").write_bytes(rows[:2] + zlib.compress(b"not gzip at all"))
    with pytest.raises(UserError, match="can't be decompressed as gzip"):
        read(tmp_path / "rows.jsonl.gz")
