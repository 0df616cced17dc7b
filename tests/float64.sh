#!/usr/bin/env bash
# The laws of the compiled kernels in float64, to 1e-12, where float32's rounding hides an error of algebra: a library of its own in
# build/float64, whose kernels are compiled for double too, and the tests that run it. The installed library has none: there
# plain PyTorch computes in float64.
#
#   tests/float64.sh             tests of kernels and ops, and of each instruction set  (make nightly)
#   tests/float64.sh -k packed   what pytest is told
#
# PYTHON and CMAKE name other programs.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
CMAKE=${CMAKE:-$(command -v .venv/bin/cmake || command -v cmake)}
"$CMAKE" --log-level=WARNING -S . -B build/float64 -DTARNN_FLOAT64=ON
"$CMAKE" --build build/float64 --parallel
export TARNN_BINARY=$PWD/build/float64/libtarnn_cpu.so TARNN_KERNELS=required
"$PYTHON" -c 'from tarnn.kernels.cpu import library; assert library.computes_float64()'
[[ $# == 0 ]] && set -- -m "not compile" tests/kernels tests/ops tests/test_fuzz.py
exec "$PYTHON" -m pytest -q "$@"
