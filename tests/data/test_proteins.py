"""Sequences as they stand in FASTA and Stockholm files, and one sentence for each way in which a file is damaged."""

import gzip

import pytest

from tarnn.data.proteins import read_proteins
from tarnn.data.sources import read_documents
from tarnn.errors import UserError

GOOD = ">sp|P1 one OS=x\nMKV\nlaX\n\n>two\nACDEFGHIKLMNPQRSTVWYBJOUXZ\n"
ALIGNED = "# STOCKHOLM 1.0\n#=GF ID x\n\na ..MK\nb A-VL\n#=GC RF ..xx\n\na LL.\nb lL~\n//\n"
# name of the file, its content, and the sentence after its path
DAMAGED = {
    "no header": ("a.fa", "MKV\n>x\nA\n", ", line 1: expected a FASTA header, .* got MKV"),
    "odd letter": ("a.fa", ">x\nMKV\nM*A\n", r", line 3: '\*' is not an amino acid; expected the letters ACD"),
    "gap in a sequence": ("a.fa", ">x\nMK-V\n", ", line 2: '-' is not an amino acid"),
    "no sequence": ("a.fa", ">x\n\n>y\nA\n", ", line 1: the sequence of x is empty"),
    "no last sequence": ("a.fa", ">x\nA\n>y\n", ", line 3: the sequence of y is empty"),
    "empty": ("a.fa", "", " holds no sequence"),
    "cut short": ("a.sto", ALIGNED[:-3], ", line 9: the alignment is cut short"),
    "not aligned": ("a.sto", ALIGNED.replace("A-VL", "A-V"), ", line 5: the row of b has 6 columns .* 7"),
    "no row": ("a.sto", ALIGNED.replace("b A-VL", "b"), ", line 5: expected a row of an alignment"),
    "gaps only": ("a.sto", ALIGNED.replace("lL~", "...").replace("A-VL", "...."), ", line 5: .* gaps only"),
    "odd letter in a row": ("a.sto", ALIGNED.replace("A-VL", "A-1L"), ", line 5: '1' is not an amino acid"),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fasta(tmp_path, suffix):
    path = tmp_path / f"a.fasta{suffix}"
    path.write_bytes(gzip.compress(GOOD.encode()) if suffix else GOOD.encode())
    assert [tuple(x) for x in read_proteins(path)] == [
        ("sp|P1 one OS=x", "MKVLAX", f"{path}, line 1"),
        ("two", "ACDEFGHIKLMNPQRSTVWYBJOUXZ", f"{path}, line 5"),
    ]
    assert [x.data for x in read_documents([str(path)])] == [b"MKVLAX", b"ACDEFGHIKLMNPQRSTVWYBJOUXZ"]


def test_stockholm_without_gaps_and_block_by_block(tmp_path):
    path = tmp_path / "a.sto"
    path.write_text(2 * ALIGNED)
    assert [x[:2] for x in read_proteins(path)] == 2 * [("a", "MKLL"), ("b", "AVLLL")]


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_told_with_file_and_line(tmp_path, case):
    name, content, sentence = DAMAGED[case]
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=sentence) as error:
        list(read_proteins(path))
    assert str(error.value).startswith(str(path))


def test_broken_compression_and_what_is_no_text(tmp_path):
    path = tmp_path / "a.fasta.gz"
    path.write_bytes(gzip.compress(GOOD.encode() * 99)[:-12])
    with pytest.raises(UserError, match="can't be decompressed as gzip"):
        list(read_proteins(path))
    path.write_bytes(b"\x00\xff\x01")
    with pytest.raises(UserError, match="line 1: expected a FASTA header"):
        list(read_proteins(path))


def test_a_file_is_read_as_it_is_asked_for(tmp_path):
    """What comes late in a file costs nothing before it is asked for, and no error either."""
    path = tmp_path / "a.fa"
    path.write_text(GOOD + ">bad\n**\n")
    proteins = read_proteins(path)
    assert [next(proteins).name, next(proteins).name] == ["sp|P1 one OS=x", "two"]
    with pytest.raises(UserError, match="line 8"):
        next(proteins)


def test_shared_data(data):
    count = {name: len(list(read_proteins(data(f"proteins/{name}")))) for name in ("globins45.fasta", "globins4.sto")}
    assert count == {"globins45.fasta": 45, "globins4.sto": 4}
    assert [len(x.sequence) for x in read_proteins(data("proteins/BPT1_BOVIN.fasta"))] == [100, 58]
