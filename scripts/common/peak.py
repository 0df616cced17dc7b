"""A loop of multiply–adds in registers: the most that a processor computes, which no product of matrices quite reaches."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

FLAGS = {"AVX512": ["-mavx512f"], "AVX2": ["-mavx2", "-mfma"]}
ROUNDS = 1 << 20
SOURCE = """
#if defined(__AVX512F__)
typedef float Vector __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef float Vector __attribute__((vector_size(32)));
#else
typedef float Vector __attribute__((vector_size(16)));
#endif
extern "C" int lanes() { return sizeof(Vector) / sizeof(float); }
#define TEN(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9)
extern "C" float loop(long rounds, float factor, float addend) {
  const Vector by = Vector{} + factor, more = Vector{} + addend;
#define BEGIN(i) Vector sum##i = by * float(i);
#define MULTIPLY_ADD(i) sum##i = sum##i * by + more;
#define ADD(i) all += sum##i;
  TEN(BEGIN)
  for (long i = 0; i < rounds; ++i) { TEN(MULTIPLY_ADD) }
  Vector all = {};
  TEN(ADD)
  float total = 0;
  for (int i = 0; i < lanes(); ++i) total += all[i];
  return total;
}
"""


@cache
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which("c++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "peak.cpp"), Path(folder, "peak.so")
        source.write_text(SOURCE, encoding="utf-8")
        flags = FLAGS.get(torch.backends.cpu.get_cpu_capability(), [])
        subprocess.run([compiler, "-O3", *flags, "-shared", "-fPIC", source, "-o", library], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.loop.argtypes, loaded.loop.restype = [ctypes.c_long, ctypes.c_float, ctypes.c_float], ctypes.c_float
    return loaded


def multiply_adds(threads: int) -> tuple[Callable[[], object], int] | None:
    """A call that keeps so many threads multiplying and adding in float32, and its operations; None without a C++ compiler."""
    library = _library()
    if library is None:
        return None
    pool = ThreadPoolExecutor(threads)

    def call() -> list[float]:
        return list(pool.map(lambda _: library.loop(ROUNDS, 0.999, 0.001), range(threads)))

    return call, threads * ROUNDS * 10 * 2 * library.lanes()
