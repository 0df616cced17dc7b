"""The experiments' scripts, run in this process with tiny sizes; small data made up for them."""

import gzip
import io
import random
import struct
import wave
import zipfile

import numpy as np
import pytest
from support.scripts import data_of, folder, pictures, script  # noqa: F401  fixtures

from tarnn.data.proteins import AMINO_ACIDS


@pytest.fixture
def books(tmp_path):
    made, words = tmp_path / "books", random.Random(0)
    made.mkdir()
    for name in ("one", "two", "pride_and_prejudice", "war_and_peace"):
        text = "".join(words.choice(["the cat ", "a hat ", "sat on ", "the mat.\n"]) for _ in range(400))
        (made / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    return made


@pytest.fixture
def mnist(tmp_path):
    """MNIST's files, with a few noisy images of 8 × 8."""
    made = tmp_path / "mnist"
    made.mkdir()
    for part, n in (("train", 40), ("t10k", 6)):
        pixels = np.random.default_rng(n).integers(100, 110, (n, 8, 8), dtype=np.uint8)
        data = struct.pack(">BBBB3I", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
        (made / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(data))
    return made


@pytest.fixture
def reviews(tmp_path):
    for name in ("train", "test"):
        rows = [f"{i % 2}\t{i}\tx\t{'a good one' if i % 2 else 'a bad one'}\n" for i in range(16)]
        (tmp_path / f"{name}.tsv.gz").write_text("".join(rows))  # read by what it holds, not by its name
    return tmp_path


@pytest.fixture
def sequences(tmp_path):
    """A family of one, a sequence that holds a part of it, one that is named after it, and others."""
    draw, made = np.random.default_rng(0), tmp_path / "proteins"
    made.mkdir()

    def sequence(n):
        return "".join(draw.choice(list(AMINO_ACIDS), n))

    member, rest = sequence(60), [(f"P{i}", sequence(80)) for i in range(12)]
    (made / "globins45.fasta").write_text(f">member\n{member}\n")
    (made / "Pkinase_PF00069_seed.sto").write_text(f"# STOCKHOLM 1.0\nkinase {sequence(50)}\n//\n")
    named = [("alike", sequence(9) + member[20:40]), ("Hemoglobin", sequence(30)), ("again", rest[0][1])]
    (made / "uniprot_20k.fasta.gz").write_text("".join(f">{name}\n{s}\n" for name, s in named + rest))
    relatives = [(f"Q{i}", s[:40] + sequence(40)) for i, (_, s) in enumerate(rest[:4])]  # families of two
    (made / "uniprot_queries_500.fasta.gz").write_text("".join(f">{name}\n{s}\n" for name, s in relatives))
    return made


@pytest.fixture
def recordings(tmp_path):
    """Folders like those of AN4 and FSDD, of noise."""
    draw, (an4, fsdd) = np.random.default_rng(0), (tmp_path / "sound" / x for x in ("an4", "fsdd"))
    an4.mkdir(parents=True)
    fsdd.mkdir()
    (an4 / "an4.dic").write_text("NO  N OW\nA  AH\nA(2)  EY\n")
    (an4 / "an4.phone").write_text("AH\nN\nOW\n")
    for part, texts in (("train", ["NO", "A NO", "NO NO", "A A"]), ("test", ["NO A", "A"])):
        lengths = np.array([20 + 5 * i for i in range(len(texts))])
        np.savez(
            an4 / f"{part}.npz",
            features=draw.normal(size=(lengths.sum(), 13)).astype(np.float16),
            offsets=np.append(0, lengths.cumsum()),
            ids=[f"u{i}" for i in range(len(texts))],
            text=texts,
        )
    with zipfile.ZipFile(fsdd / "recordings.zip", "w") as archive:
        for name in ("0_a_0", "1_a_9", "2_a_1", "7_b_40", "9_b_8"):
            with wave.open(file := io.BytesIO(), "wb") as sound:
                sound.setparams((1, 2, 8000, 0, "NONE", ""))
                sound.writeframes(draw.normal(0, 3000, 3000).astype("<i2").tobytes())
            archive.writestr(f"{name}.wav", file.getvalue())
    return tmp_path / "sound"
