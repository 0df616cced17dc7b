"""The C interface of the runtime: to the bit what Python's gives, and a code and a sentence for anything else."""

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.c_library import (
    BAD_ARGUMENT,
    BAD_FILE,
    BAD_STATE,
    BAD_TOKEN,
    BINARY,
    HEADER,
    MISSING,
    NO_MEMORY,
    Library,
    Refused,
)
from support.drawn_programs import VOCABULARY, drawn_program
from support.open_folders import make_folder

import tarnn
from tarnn.decoding.pack import pack_folder
from tarnn.decoding.packed_file import write_packed
from tarnn.kernels.cpu import library
from tarnn.models import TarnnConfig, TarnnForCausalLM
from tarnn.program.outline import outline_of
from tarnn.program.packing import pack
from tarnn.program.runtime import Runtime

pytestmark = [
    pytest.mark.skipif(not library.available(), reason="the compiled kernels can't be used"),
    pytest.mark.skipif(not BINARY.exists(), reason=MISSING),
]
FORMATS = ("float32", "bfloat16", "int8", "int4")


def packed(path, seed, weights="float32"):
    """A drawn program as a file, and as Python runs it."""
    program = drawn_program(seed)
    write_packed(path, pack(program, weights), {"outline": outline_of(program)}, {})
    return Runtime(program, weights)


@pytest.fixture(scope="module")
def c():
    return Library()


@pytest.fixture
def opened(c, tmp_path):
    """A drawn program with a state that grows with tokens, open; and its file."""
    for seed in range(50):
        if any(x.grows is not None for x in drawn_program(seed).states):
            runtime = packed(tmp_path / "x.tarnn", seed)
            return c.open(tmp_path / "x.tarnn"), runtime, tmp_path / "x.tarnn"
    raise AssertionError("no program that was drawn has softmax attention")


def of_python(path):
    """What the program in C computes, each sequence alone."""
    lm = tarnn.load(path)

    def step(state, token):
        return lm.step(torch.tensor([token]), state)[1]

    first, second = lm.read([3, 1, 4, 1, 5, 9, 2]), lm.read([6, 5, 3, 5])
    found = [first, second]
    first, second = step(first, 8), step(second, 9)
    found += [first, second, step(second, 7), step(first, 9), step(second, 3)]
    longer = lm.read([2, 3, 8, 4, 6], second)
    # a sequence without tokens leaves its logits as they are: those of its place before
    found += [found[4], longer, step(first, 8), step(longer, 9)]
    return torch.cat([x.logits for x in found])


@pytest.mark.parametrize("weights", ["float32", "int8"])
def test_a_program_in_c_without_torch(tmp_path, weights):
    """It is C99, its library needs no torch, and it reads, steps, copies, saves and loads as `tarnn.load` does."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    env = {name: x for name, x in os.environ.items() if name != "LD_PRELOAD"}  # sanitizers are not for the compiler
    place, program = BINARY.parent, tmp_path / "program"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", "-I", HEADER]
    source = Path(__file__).with_name("c_api.c")
    subprocess.run(
        [compiler, *flags, source, "-L", place, "-ltarnn", f"-Wl,-rpath,{place}", "-o", program], check=True, env=env
    )
    pack_folder(make_folder(tmp_path / "folder", "Qwen3.5", begins=True), tmp_path / "x.tarnn", weights)
    expected = of_python(tmp_path / "x.tarnn")
    for threads in ("1", "2"):
        subprocess.run([program, tmp_path / "x.tarnn", tmp_path / "out", threads], check=True)
        got = torch.frombuffer(bytearray((tmp_path / "out").read_bytes()), dtype=torch.float32).view(
            -1, expected.shape[1]
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("seed", range(12))
def test_drawn_programs_give_the_bits_of_python(c, tmp_path, seed, weights):
    runtime = packed(tmp_path / "x.tarnn", seed, weights)
    chance, p = random.Random(seed), runtime.num_outputs
    rows = [[chance.randrange(VOCABULARY) for _ in range(n)] for n in (5, 1, 9)]
    program = c.open(tmp_path / "x.tarnn")
    assert (c.c.tarnn_vocab_size(program), c.c.tarnn_num_outputs(program)) == (VOCABULARY, p)
    state = c.new(program, 3)
    read = [runtime.prefill(torch.tensor([row]), runtime.new_state(1, 30)) for row in rows]
    assert torch.equal(c.read(state, rows, p, threads=1 + seed % 2), torch.cat([x for x, _ in read]))
    state = c.load(program, c.save(c.fork(state, [2, 0])))
    for token in range(6):  # caches grow
        read = [runtime(torch.tensor([token]), x) for _, x in read]
        assert torch.equal(c.step(state, [token, token], p), torch.cat([read[2][0], read[0][0]]))
    assert [c.c.tarnn_position(state, i) for i in (0, 1)] == [15, 11]


def test_positions_by_a_formula(c, tmp_path):
    torch.manual_seed(0)
    config = TarnnConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, position="sinusoidal"
    )
    TarnnForCausalLM(config).save_pretrained(tmp_path / "folder")
    from tarnn.families.by_name import open_program

    program = open_program(tmp_path / "folder")
    assert program.instructions[0].numbers["sinusoidal"]
    runtime = Runtime(program)
    write_packed(tmp_path / "x.tarnn", runtime.packed, {"outline": outline_of(program)}, {})
    ids = torch.randint(50, (1, 300))
    state = c.new(c.open(tmp_path / "x.tarnn"), 1)
    assert torch.equal(c.read(state, ids.tolist(), 50), runtime.prefill(ids, runtime.new_state(1, 300))[0])


def refused(code, words, function, *arguments):
    with pytest.raises(Refused) as error:
        function(*arguments)
    assert error.value.args[0] == code, error.value.args[1]
    assert words in error.value.args[1]
    assert error.value.args[1].endswith(".")


def test_tokens_and_arguments_that_can_not_be(c, opened):
    """And nothing is changed by them."""
    program, runtime, _ = opened
    p, state = runtime.num_outputs, c.new(program, 2)
    before = c.save(state)
    for wrong in (-1, VOCABULARY, 2**62):
        refused(BAD_TOKEN, f"from 0 to {VOCABULARY - 1}; got {wrong}", c.step, state, [0, wrong], p)
    refused(BAD_TOKEN, "65 tokens came at position 0", c.read, state, [[0] * 65, []], p)
    refused(BAD_ARGUMENT, "threads are from 1 to", c.step, state, [0, 0], p, 0)
    refused(BAD_ARGUMENT, "1 sequence or more; got 0", c.fork, state, [])
    refused(BAD_ARGUMENT, "sequences are 0 to 1; got 2", c.fork, state, [2])
    for count in (0, -1, 2**40):
        refused(BAD_ARGUMENT, f"got {count}", c.new, program, count)
    refused(BAD_ARGUMENT, "the path is null", c.made, "open", None)
    refused(BAD_ARGUMENT, "tokens is null", c.call, "step", state, None, 1, None)
    refused(BAD_ARGUMENT, "bytes; got room for 7", c.call, "save", state, before, 7, before)
    assert c.save(state) == before


def test_saved_bytes_that_are_no_state_of_the_program(c, opened, tmp_path):
    program, runtime, _ = opened
    state = c.new(program, 2)
    c.read(state, [[1, 2, 3], [4]], runtime.num_outputs)
    data = c.save(state)
    refused(BAD_STATE, "are no saved state", c.load, program, b"x" * 100)
    packed(tmp_path / "y.tarnn", 3)
    refused(BAD_STATE, "of another program", c.load, c.open(tmp_path / "y.tarnn"), data)
    refused(BAD_STATE, "too long", c.load, program, data + b"x")
    for n in (0, 7, 20, 80, 90, len(data) // 2, len(data) - 1):
        refused(BAD_STATE, "", c.load, program, data[:n])
    chance = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        refused(BAD_STATE, "", c.load, program, bytes(damaged))


def test_files_that_are_no_packed_model(c, opened, tmp_path):
    _, _, path = opened
    whole = path.read_bytes()
    refused(BAD_FILE, "No such file", c.open, tmp_path / "missing")
    refused(BAD_FILE, "no file that can be mapped", c.open, tmp_path)
    for data, words in (
        (b"", "is empty"), (b"tarnn", "too short"), (b"\xff" * 100, "cut short"), (whole[:200], "cut short"),
        (whole.replace(b'"tarnn.packed"', b'"other.packed"'), "of another kind"), (whole[:-500], "is damaged"),
        (whole.replace(b'"format_version": "2"', b'"format_version": "9"'), "version 9"),
        (whole.replace(b'"outline', b'"Outline'), "is damaged"), (whole.replace(b"{", b"[", 1), "is damaged"),
    ):  # fmt: skip
        (tmp_path / "wrong").write_bytes(data)
        refused(BAD_FILE, words, c.open, tmp_path / "wrong")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_or_run(c, opened, tmp_path, seed):
    """One or two bytes of the header or the program changed (under sanitizers a read beyond the memory ends the process)."""
    _, runtime, path = opened
    chance, whole = random.Random(seed), path.read_bytes()
    length, codes = 8 + int.from_bytes(whole[:8], "little"), []
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 2)):
            data[chance.randrange(length)] = chance.randrange(32, 127)
        (tmp_path / "damaged").write_bytes(data)
        try:
            state = c.new(c.open(tmp_path / "damaged"), 1)
            c.read(state, [[1, 2, 3]], runtime.num_outputs)
        except Refused as error:
            codes.append(error.args[0])
    assert len(codes) > 50
    assert set(codes) <= {BAD_FILE, NO_MEMORY}
