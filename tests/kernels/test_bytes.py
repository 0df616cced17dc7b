"""Products with packed weights by each instruction that this processor has."""

from pathlib import Path

import pytest
from support.alone import build, output

EVEX = '-DTARNN_VPDPBUSD="%{evex%} vpdpbusd"'  # of AVX-512 VNNI, 256 bits wide: the same instruction as AVX-VNNI's


AVX512 = ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-DTARNN_ISA=avx512")


@pytest.mark.slow
def test_every_instruction_beside_avx512(tmp_path):
    """vpdpbusd, vdpbf16ps and AMX's tiles, those of them that there are."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if "avx512_vnni" not in flags:
        pytest.skip("this processor has no AVX-512 VNNI")
    names = ["pmaddwd", "vpdpbusd"] + ["vdpbf16ps"] * ("avx512_bf16" in flags) + ["amx"] * ("amx_bf16" in flags)
    program = build("products_alone", tmp_path, "-O1", "-Wno-psabi", *AVX512)
    assert output(program) == f"products right, {', '.join(names)}"


@pytest.mark.slow
def test_avx_vnni_gives_the_sums_of_avx2(tmp_path):
    """The kernels of AVX2 with vpdpbusd in the encoding that this processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx512_vnni" not in cpuinfo.read_text():
        pytest.skip("this processor has no AVX-512 VNNI")
    program = build("products_alone", tmp_path, "-O1", "-Wno-psabi", "-mavx2", "-mfma", "-DTARNN_ISA=avx2", EVEX)
    assert output(program) == "products right, pmaddwd, vpdpbusd"
