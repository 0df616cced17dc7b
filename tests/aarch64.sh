#!/usr/bin/env bash
# The arithmetic of the kernels on another processor, without torch: tests/kernels/alone.cpp (attention), products_alone.cpp
# and softmax_alone.cpp (the fused step's products and softmax), which hold them against loops in float64, compiled for aarch64 (NEON) and run under qemu-user.
# About three minutes.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user && tests/aarch64.sh
#   CXX=g++-11 FLAGS="-DTARNN_ISA=avx2 -mavx2 -mfma" RUN= tests/aarch64.sh     another compiler or instruction set, here
set -euo pipefail
cd "$(dirname "$0")/.."
CXX=${CXX:-aarch64-linux-gnu-g++}
RUN=${RUN-qemu-aarch64}
command -v "$CXX" > /dev/null || { echo "aarch64: skipped, there is no $CXX"; exit 0; }
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
for name in alone products_alone softmax_alone; do
    # shellcheck disable=SC2086
    "$CXX" -std=c++20 -O2 -static -Wall -Wextra -Wno-psabi -fno-math-errno -fno-trapping-math ${FLAGS:-} -I csrc \
        "tests/kernels/$name.cpp" -o "$build/$name"
    echo "$("$CXX" --version | head -1)${FLAGS:+, $FLAGS}: $($RUN "$build/$name")"
done
