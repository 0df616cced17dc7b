"""Products of bytes by instructions that this processor's own kernels don't take."""

from pathlib import Path

import pytest
from support.alone import build, output

EVEX = '-DTARNN_VPDPBUSD="%{evex%} vpdpbusd"'  # of AVX-512 VNNI, 256 bits wide: the same instruction as AVX-VNNI's


@pytest.mark.slow
def test_avx_vnni_gives_the_sums_of_avx2(tmp_path):
    """The kernels of AVX2 with vpdpbusd in the encoding that this processor has."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists() or "avx512_vnni" not in cpuinfo.read_text():
        pytest.skip("this processor has no AVX-512 VNNI")
    program = build("products_alone", tmp_path, "-O1", "-Wno-psabi", "-mavx2", "-mfma", "-DTARNN_ISA=avx2", EVEX)
    assert output(program) == "products right, pmaddwd, vpdpbusd"
