"""A packed file is its folder, to the bit; anything else that a file can be is refused in a sentence."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from support.open_folders import PACKED_AND_SERVED, make_folder
from transformers import AutoTokenizer

import tarnn
from tarnn.cli.main import main
from tarnn.data.tokenizers import byte_tokenizer
from tarnn.decoding import packed_file
from tarnn.decoding.pack import pack_folder
from tarnn.decoding.packed_file import read_packed
from tarnn.errors import UserError
from tarnn.families.by_name import open_program
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.program.packing import pack
from tarnn.program.runtime import Runtime

pytestmark = pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used")
FORMATS = ("float32", "bfloat16", "int8", "int4")
IDS = torch.randint(0, 256, (2, 23), generator=torch.Generator().manual_seed(0))


def own(folder):
    """A model of tarnn's own, with learned positions, linear and softmax layers."""
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        attention=["linear", "softmax"], position="learned",
    )  # fmt: skip
    TarnnForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["own", *PACKED_AND_SERVED])
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("packed") / "tiny"
    return own(place) if request.param == "own" else make_folder(place, request.param, begins=True)


@pytest.mark.parametrize("weights", FORMATS)
def test_logits_and_states_are_the_folders(folder, tmp_path, weights):
    size = pack_folder(folder, tmp_path / "x.tarnn", weights)
    assert size == (tmp_path / "x.tarnn").stat().st_size
    runtime, lm = Runtime(open_program(folder), weights), tarnn.load(tmp_path / "x.tarnn")
    assert lm.opened.weights == weights
    logits, state = runtime.prefill(IDS, runtime.new_state(2, 24), every=True)
    again, after = lm.opened.prefill(IDS, lm.opened.new_state(2, 24), every=True)
    assert torch.equal(again, logits)
    outputs = [x(IDS[:, 0], y)[0] for x, y in ((runtime, state), (lm.opened.step, after))]
    assert torch.equal(*outputs)


def test_embeddings_in_float16_stay_so(tmp_path):
    TarnnForCausalLM.from_pretrained(own(tmp_path / "tiny")).half().save_pretrained(tmp_path / "tiny")
    pack_folder(tmp_path / "tiny", tmp_path / "x.tarnn")
    tables, lm = read_packed(tmp_path / "x.tarnn").packed.tables, tarnn.load(tmp_path / "x.tarnn")
    assert [x.dtype for x in tables] == [torch.float16] * 2
    wide = TarnnForCausalLM.from_pretrained(tmp_path / "tiny").float().eval()
    logits = lm.opened.prefill(IDS, lm.opened.new_state(2, 24), every=True)[0]
    assert torch.allclose(logits, wide(IDS).logits, atol=1e-4)


def test_what_is_said_of_it_is_the_folders(folder, tmp_path):
    """Text, facts and states: all but that it is packed."""
    pack_folder(folder, tmp_path / "x.tarnn")
    lm, other = tarnn.load(tmp_path / "x.tarnn"), tarnn.load(folder)
    assert lm.opened.fingerprint == other.opened.fingerprint
    assert lm.opened.about[0] == f"fused step ({lm.opened.weights} weights)"
    for name in ("config", "architecture", "dtype", "key_bytes", "end_ids", "pad_id", "sampling", "num_parameters"):
        assert getattr(lm.opened, name) == getattr(other.opened, name)
    assert lm.ids("Call me \N{SNOWMAN}").tolist() == other.ids("Call me \N{SNOWMAN}").tolist()
    assert lm.tokenizer.chat_template == other.tokenizer.chat_template
    options = {"max_new_tokens": 12, "temperature": 0}
    assert "".join(lm.generate("Call me", **options)) == "".join(other.generate("Call me", **options))
    lm.save(lm.read("Call me"), tmp_path / "state")
    assert other.open_state(tmp_path / "state").position.tolist() == [len(lm.ids("Call me"))]


def mapped_at(x):
    """The file that the memory of a tensor is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(place, 16) for place in line.split()[0].split("-"))
        if start <= x.data_ptr() < end:
            return line.split()[5]
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what it maps")
def test_opening_copies_no_weight(tmp_path):
    """All tensors are one mapping of the file, aligned, with room to read beyond the end of the block."""
    folder = make_folder(tmp_path / "tiny", "Llama", torch.bfloat16)
    pack_folder(folder, tmp_path / "x.tarnn", "int8")
    packed, written = read_packed(tmp_path / "x.tarnn").packed, pack(open_program(folder), "int8")
    places = [mapped_at(x) for x in (packed.block, packed.numbers, *packed.tables)]
    assert places == [str(tmp_path / "x.tarnn")] * 3
    assert packed.block.data_ptr() % 64 == 0
    assert torch.equal(packed.block, written.block)
    assert not packed.block[-256:].any()
    assert mapped_at(tarnn.load(tmp_path / "x.tarnn").opened.step.packed.block) == str(tmp_path / "x.tarnn")


def test_templates_beside_the_usual_one(tmp_path):
    folder = make_folder(tmp_path / "tiny", "Llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "tools"}
    tokenizer.save_pretrained(folder)
    pack_folder(folder, tmp_path / "x.tarnn")
    assert tarnn.load(tmp_path / "x.tarnn").tokenizer.chat_templates == tokenizer.chat_template


def test_a_file_that_is_there_stays(tmp_path):
    folder, out = make_folder(tmp_path / "tiny", "Llama"), tmp_path / "x.tarnn"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"x.tarnn exists already; name a new file, or replace it with --force"):
        pack_folder(folder, out)
    assert out.read_text() == "mine"
    pack_folder(folder, out, replace=True)
    before = tarnn.load(out)
    logits = before.logits(IDS)
    pack_folder(folder, out, "int4", replace=True)  # under a model that runs
    assert torch.equal(before.logits(IDS), logits)
    assert not torch.equal(tarnn.load(out).logits(IDS), logits)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["tiny", "x.tarnn"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "tiny", "Llama")

    def full(file, data):
        file.write(data[:9])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("tarnn.data.tensor_file.write_all", full)
    with pytest.raises(UserError, match=r"bytes\) can't be written to .*x.tarnn: No space left on device"):
        pack_folder(folder, tmp_path / "x.tarnn")
    assert [x.name for x in tmp_path.iterdir()] == ["tiny"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The bytes of a packed file."""
    place = tmp_path_factory.mktemp("damaged")
    pack_folder(make_folder(place / "tiny", "Qwen3.5"), place / "x.tarnn", "int8")
    return (place / "x.tarnn").read_bytes()


def parts(data):
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header, rest):
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + rest


def refused(path, data, match):
    path.write_bytes(data)
    with pytest.raises(UserError, match=match) as error:
        tarnn.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_no_packed_file(tmp_path, packed):
    x = tmp_path / "x.tarnn"
    refused(x, b"", "is no packed file, or one that was cut short")
    refused(x, b"Call me Ishmael. " * 99, "is no packed file, or one that was cut short")
    weights = make_folder(tmp_path / "tiny", "Llama") / "model.safetensors"
    refused(x, weights.read_bytes(), "is a safetensors file, but no packed model. `tarnn pack FOLDER FILE` writes one")
    for share in (0.0001, 0.01, 0.5, 0.999):
        refused(x, packed[: int(share * len(packed))], "is no packed file, or one that was cut short")
    refused(x, (10**15).to_bytes(8, "little") + packed[8:], "is no packed file, or one that was cut short")
    refused(x, packed + b"more", "is no packed file, or one that was cut short")


def test_of_another_version(tmp_path, packed, monkeypatch):
    header, rest = parts(packed)
    header["__metadata__"]["format_version"] = "99"
    refused(tmp_path / "x", joined(header, rest), "has version '99' of packed files; this tarnn reads version 2")
    monkeypatch.setattr(packed_file, "PROGRAM_VERSION", 7)
    refused(tmp_path / "x", packed, r"has a program of version \[\d+\]; this tarnn runs version 7")


@pytest.mark.parametrize("name", ["block", "table.0", "file:tokenizer.json"])
def test_info_reads_all_of_it(tmp_path, packed, name, capsys):
    """A bit that changed among the weights opens, since opening looks at the header alone; `tarnn info` refuses it."""
    path = tmp_path / "x.tarnn"
    path.write_bytes(packed)
    packed_file.check_contents(path)
    assert main(["info", str(path)]) == 0
    header, rest = parts(packed)
    begin, end = header[name]["data_offsets"]
    at = len(packed) - len(rest) + (begin + end) // 2
    path.write_bytes(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
    capsys.readouterr()
    assert main(["info", str(path)]) == 2
    sentence = f"{path} is damaged: {name.removeprefix('file:')} changed since it was written. Pack its folder again"
    assert sentence in capsys.readouterr().err


def test_of_another_format(tmp_path, packed):
    (tmp_path / "x").write_bytes(packed)
    with pytest.raises(UserError, match=r"x holds int8 weights; expected them as int4\. Pack its folder with"):
        tarnn.load(tmp_path / "x", "int4")
    assert tarnn.load(tmp_path / "x", "int8").opened.weights == "int8"


def test_a_header_that_was_changed(tmp_path, packed):
    header, rest = parts(packed)
    header["__metadata__"]["facts"] = header["__metadata__"]["facts"].replace('"key_bytes": ', '"key_bytes": 1')
    refused(tmp_path / "x", joined(header, rest), "is damaged: its header is not the one that was written")
    header, rest = parts(packed)
    text = json.dumps(header).encode()
    text += b" " * (8 - (len(text) + 8) % 64)  # the block begins elsewhere
    refused(tmp_path / "x", len(text).to_bytes(8, "little") + text + rest, "tensors do not lie where they should")


def changed(facts, path, value):
    for key in path[:-1]:
        facts = facts[key]
    facts[path[-1]] = value


LIES = {
    "a format": (["weights"], "int9"),
    "no outline": (["outline"], None),
    "no states": (["outline", "states"], []),
    "heads": (["outline", "states", 0, 3], [10**9, 8]),
    "sizes beyond any memory": (["outline", "states", 0, 3], [10**30]),
    "a negative size": (["outline", "states", 0, 3], [-1, -512]),
    "a float for a size": (["outline", "states", 0, 3], [512.0]),
    "a class": (["outline", "layers", 0], "Popen"),
    "a layer": (["outline", "states", 0, 0], 10**6),
    "a type": (["outline", "states", 0, 4], "complex64"),
    "an axis": (["outline", "states", 0, 5], 99),
    "a name": (["outline", "states", 0, 2], "__class__"),
    "outputs": (["outline", "num_outputs"], 10**12),
    "positions": (["outline", "limit"], 3),
    "the vocabulary": (["config", 0], 10**9),
    "tokens that end": (["end_ids"], ["<|end|>"]),
    "a type of weights": (["dtype"], "object"),
}


@pytest.mark.parametrize("lie", LIES)
def test_facts_that_lie_with_a_hash_that_fits(tmp_path, packed, lie):
    (tmp_path / "whole").write_bytes(packed)
    numbers = read_packed(tmp_path / "whole").packed.numbers
    header, rest = parts(packed)
    facts = json.loads(header["__metadata__"]["facts"])
    changed(facts, *LIES[lie])
    text = json.dumps(facts)
    header["__metadata__"] |= {"facts": text, "checksum": packed_file.checksum(text, numbers)}
    refused(tmp_path / "x", joined(header, rest), r"is damaged \(.*\). Pack its folder again")


def test_files_that_lead_elsewhere(tmp_path, packed):
    header, rest = parts(packed)
    header["file:../../evil.jinja"] = header.pop("file:chat_template.jinja")
    refused(tmp_path / "x", joined(header, rest), "which is no file of a tokenizer")
    assert not [*tmp_path.rglob("evil*")]


def test_numbers_that_lie(tmp_path, packed):
    """The compiled runtime looks at all of them; whatever is changed in one is refused, or changes no size."""
    (tmp_path / "whole").write_bytes(packed)
    numbers, facts = read_packed(tmp_path / "whole").packed.numbers, parts(packed)[0]["__metadata__"]["facts"]
    refusals = 0
    for i in [*range(12), *range(12, len(numbers), 97)]:
        header, rest = parts(packed)
        start, end = header["numbers"]["data_offsets"]
        other = numbers.clone()
        other[i] = 10**9 if i else 1
        header["__metadata__"]["checksum"] = packed_file.checksum(facts, other)
        (tmp_path / "x").write_bytes(joined(header, rest[:start] + other.numpy().tobytes() + rest[end:]))
        try:
            tarnn.load(tmp_path / "x")
        except UserError as error:
            refusals += "is damaged (" in str(error)
    assert refusals > 12


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_a_file_larger_than_memory_is_mapped(tmp_path):
    """Linux refuses to map so much to be written. The file has one empty page after the other, and takes no room."""
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    header = json.dumps({"block": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "large").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(UserError, match="but no packed model"):
        read_packed(tmp_path / "large")
