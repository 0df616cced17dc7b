"""The loader of the compiled kernels: what it finds, what it says, what it refuses; and what the chooser makes of it."""

import os
import platform
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tarnn.errors import SlowPathWarning
from tarnn.kernels import contract
from tarnn.kernels.cpu import library, linear as compiled
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call
from tarnn.ops.backends import cpu_kernels

ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
BINARY = Path(os.environ.get("TARNN_BINARY") or library.BINARY)
needs_binary = pytest.mark.skipif(not BINARY.exists(), reason="the kernels are not compiled here")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a process that has not asked yet, with no variable set but the sanitizers' own library."""
    monkeypatch.setattr(library, "_status", None)
    contract._warn_once.cache_clear()
    for name in ("TARNN_KERNELS", "TARNN_ISA"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def without_binary(monkeypatch, tmp_path):
    monkeypatch.delenv("TARNN_BINARY", raising=False)
    monkeypatch.setattr(library, "BINARY", tmp_path / "libtarnn_cpu.so")


def chosen():
    """The backend of a small call on a CPU."""
    x = torch.ones(1, 1, 1, 2)
    return contract.choose("linear", Call(x, x, x))


def in_a_process(code: str, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@needs_binary
def test_the_kernels_serve_where_they_are_compiled():
    assert library.available()
    path, why = library.status()
    assert path in {f"compiled, {isa}" for isa in library.ISAS}
    assert why.startswith(("the processor", "the only one"))


def test_within_disabled_plain_pytorch_serves():
    before = library.available()
    with library.disabled():
        with library.disabled():
            assert not library.available()
        assert not library.available()
        assert library.status() == ("PyTorch", "switched off by tarnn.kernels.cpu.library.disabled()")
    assert library.available() == before


def test_switched_off_on_purpose_is_no_reason_to_warn(monkeypatch):
    monkeypatch.setenv("TARNN_KERNELS", "off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() is eager
    assert library.status() == ("PyTorch", "switched off by TARNN_KERNELS=off")


def test_a_missing_binary_is_told_once_with_the_remedy(without_binary):
    with library.disabled():
        assert chosen() is eager  # asks for none, so misses none
    assert library.status().path == "PyTorch"
    with pytest.warns(
        SlowPathWarning, match="no compiled kernels in this installation: install a C.. compiler.*pip install"
    ):
        assert chosen() is eager
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() is eager


def test_a_binary_that_does_not_load_is_told_with_its_error(without_binary):
    library.BINARY.write_bytes(b"no library")
    with pytest.warns(SlowPathWarning, match=r"could not be loaded \(.*libtarnn_cpu.so"):
        assert chosen() is eager


def test_the_op_asks_for_the_kernels_and_no_import_does(without_binary):
    """A call, not an import, loads the kernels or warns."""
    code = (
        "import torch, tarnn, tarnn.ops, tarnn.attention\nfrom tarnn.kernels.cpu import library\n"
        "assert library._status is None and not torch.ops.loaded_libraries"
    )
    in_a_process(code)


def test_instructions_nobody_knows_are_refused(monkeypatch):
    monkeypatch.setenv("TARNN_DOTS", "vnni,mmx")
    with pytest.raises(ValueError, match=r"TARNN_DOTS is some of none, vnni, .*; got 'mmx'"):
        library.status()


@needs_binary
def test_instructions_for_products_can_be_chosen():
    code = "from tarnn.ops import backends; print(backends.products_by()['bfloat16'])"
    assert in_a_process(code, TARNN_DOTS="none") == "float32"


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("TARNN_KERNELS", "fast", "off or required"),
        ("TARNN_ISA", "sse9", "baseline, avx2, avx512 or avx512bf16"),
        ("TARNN_LARGE_PAGES", "no", "off or on"),
    ],
)
def test_settings_nobody_knows_are_refused_each_time(monkeypatch, name, value, known):
    monkeypatch.setenv(name, value)
    for ask in (library.available, library.status):
        with pytest.raises(ValueError, match=f"{name} is {known}, or not set; got '{value}'"):
            ask()


def test_another_library_has_to_exist(monkeypatch):
    monkeypatch.setenv("TARNN_BINARY", "/nowhere/lib.so")
    with pytest.raises(ValueError, match=r"no file '/nowhere/lib\.so'"):
        library.status()


def test_required_kernels_that_are_missing_are_an_error(monkeypatch, without_binary):
    monkeypatch.setenv("TARNN_KERNELS", "required")
    with pytest.raises(ValueError, match="TARNN_KERNELS=required, but no compiled kernels"):
        library.available()


@needs_binary
def test_the_instruction_set_can_be_chosen():
    """The plainest, which every processor has that has any: AVX2 on x86-64."""
    plainest = "avx2" if ON_X86 else "baseline"
    code = "from tarnn.kernels.cpu import library; print(*library.status(), sep=': ')"
    assert in_a_process(code, TARNN_ISA=plainest) == f"compiled, {plainest}: TARNN_ISA={plainest} asks for it"


@needs_binary
@pytest.mark.skipif(not ON_X86, reason="elsewhere there is nothing but the baseline")
def test_x86_64_has_no_kernels_below_avx2():
    code = (
        "from tarnn.kernels.cpu import library\ntry: library.status()\nexcept ValueError as error: print(error)\n"
        "else: print(library.status())"
    )
    found = in_a_process(code, TARNN_ISA="baseline")
    assert found.startswith("TARNN_ISA=baseline: this processor or this build of the kernels doesn't have it"), found


@pytest.fixture
def lacking(monkeypatch):
    """A library that has kernels for none of this processor's instruction sets, or not for the one that is asked for."""

    class Lacking:
        def isa(self):
            raise RuntimeError("not an instruction set of this processor")

    monkeypatch.setattr(library.torch.ops, "tarnn_cpu", Lacking())


@needs_binary
def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch, lacking):
    monkeypatch.setenv("TARNN_ISA", "avx512")
    with pytest.raises(
        ValueError, match="TARNN_ISA=avx512: this processor or this build of the kernels doesn't have it"
    ):
        library.status()


@needs_binary
def test_a_processor_without_avx2_gets_plain_pytorch_and_one_sentence(monkeypatch, lacking):
    with pytest.warns(SlowPathWarning, match=r"runs in plain PyTorch.*this processor lacks AVX2 or FMA") as warned:
        assert chosen() is eager
    assert len(warned) == 1
    assert cpu_kernels() == {"path": "PyTorch", "why": library.NO_ISA}  # as `tarnn info` shows it
    monkeypatch.setattr(library, "_status", None)
    monkeypatch.setenv("TARNN_KERNELS", "required")
    with pytest.raises(ValueError, match="TARNN_KERNELS=required, but this processor lacks AVX2"):
        library.status()


@pytest.mark.skipif(not ON_X86, reason="these are flags of x86-64")
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_which_instruction_set_runs_on_other_processors(tmp_path):
    """csrc/isa.h, on processors whose flags are made up."""
    program, root = tmp_path / "isa", Path(__file__).parents[2]
    source = root / "tests/kernels/isa_alone.cpp"
    subprocess.run(["c++", "-std=c++20", "-I", root / "csrc", source, "-o", program], check=True)
    avx2 = ["avx2", "fma"]
    avx512 = [*avx2, "avx512f", "avx512bw", "avx512vl", "avx512dq"]
    found = {
        (wish, len(flags)): subprocess.run([program, wish, *flags], capture_output=True, text=True).stdout.strip()
        for wish in ("", "avx2", "avx512", "baseline")
        for flags in ([], ["avx2"], avx2, avx512[:-1], avx512, [*avx512, "avx512bf16"])
    }
    assert found == {
        **{("", n): isa for n, isa in zip((0, 1, 2, 5, 6, 7), ["none"] * 2 + ["avx2"] * 2 + ["avx512", "avx512bf16"])},
        **{("avx2", n): isa for n, isa in zip((0, 1, 2, 5, 6, 7), ["none"] * 2 + ["avx2"] * 4)},
        **{("avx512", n): isa for n, isa in zip((0, 1, 2, 5, 6, 7), ["none"] * 4 + ["avx512"] * 2)},
        **{("baseline", n): "none" for n in (0, 1, 2, 5, 6, 7)},
    }


@needs_binary
def test_float64_is_computed_in_plain_pytorch():
    """But with the library of tests/float64.sh."""
    x = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody can mend it
        backend = contract.choose("linear", Call(x, x, x))
    assert (backend is eager) != library.computes_float64()
    if not library.computes_float64():
        with pytest.raises(ValueError, match="don't compute in float64; plain PyTorch does"):
            compiled.forward(Call(x, x, x))
