"""The loader of the compiled kernels: what it finds, what it says, what it refuses; and what the chooser makes of it."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from tarnn.errors import SlowPathWarning
from tarnn.kernels import contract
from tarnn.kernels.cpu import library
from tarnn.kernels.eager import linear as eager
from tarnn.kernels.linear import Call

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
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_the_instruction_set_can_be_chosen(isa):
    if isa == "avx2" and library.status().path == "compiled, baseline":
        pytest.skip("this processor has no AVX2")
    code = "from tarnn.kernels.cpu import library; print(*library.status(), sep=': ')"
    assert in_a_process(code, TARNN_ISA=isa) == f"compiled, {isa}: TARNN_ISA={isa} asks for it"


@needs_binary
def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch):
    class Lacking:
        def isa(self):
            raise RuntimeError("not an instruction set of this processor")

    monkeypatch.setattr(library.torch.ops, "tarnn_cpu", Lacking())
    monkeypatch.setenv("TARNN_ISA", "avx512")
    with pytest.raises(
        ValueError, match="TARNN_ISA=avx512: this processor or this build of the kernels doesn't have it"
    ):
        library.status()
