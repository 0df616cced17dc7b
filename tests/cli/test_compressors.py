"""Bits per byte of compressors, beside what the commands themselves write."""

import random
import shutil
import subprocess

import pytest

from tarnn.cli import compressors
from tarnn.cli.compressors import bits_per_byte

TEXT = " ".join(random.Random(0).choices(["cat", "sat", "mat", "on", "a", "that", "it"], k=5000)).encode()


@pytest.mark.parametrize(
    ("name", "command"),
    [("xz -9e", ["xz", "-9", "--extreme", "--stdout"]), ("zstd -19", ["zstd", "-19", "--stdout", "--quiet"])],
)
def test_sizes_are_those_of_the_command(name, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    written = subprocess.run(command, input=TEXT, capture_output=True, check=True).stdout
    compress = compressors.compressors()[name]
    assert abs(compress(TEXT) - len(written)) <= 8  # a checksum of another kind, and whether the size is noted


def test_zstd_comes_from_the_package_or_the_command_or_not_at_all(monkeypatch):
    package = compressors.zstd()
    monkeypatch.setattr(compressors, "find_spec", lambda name: None)
    if shutil.which("zstd"):
        assert abs(compressors.zstd()(TEXT) - package(TEXT)) <= 8
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compressors.zstd() is None
    assert compressors.compressors()["zstd -19"] is None


def test_text_that_was_seen_costs_next_to_nothing():
    noise = random.Random(1).randbytes(5000)
    found = bits_per_byte(compressors.xz, noise, training=noise)
    assert 8 <= found.alone < 8.2
    assert found.after_training < 0.3
    assert bits_per_byte(compressors.xz, noise, training=b"").after_training == pytest.approx(found.alone, abs=0.1)


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match="at least one byte"):
        bits_per_byte(compressors.xz, b"", b"seen")
