#!/usr/bin/env bash
# The arithmetic of the kernels on another processor, without torch, compiled for aarch64 (NEON) and run under qemu-user:
# tests/kernels/alone.cpp (attention), products_alone.cpp and softmax_alone.cpp (the fused step's products, by each instruction for bytes, and
# softmax), which hold them against loops in float64; and the runtime, with whole programs of every kind of layer: their logits by
# tests/program/threads_alone.cpp, against those of this machine. About five minutes.
#
#   apt-get install g++-aarch64-linux-gnu qemu-user-static && tests/aarch64.sh
#   CXX=g++-11 FLAGS="-DTARNN_ISA=avx2 -mavx2 -mfma" RUN= tests/aarch64.sh     another compiler or instruction set, here
#   NUM_PROGRAMS=0 tests/aarch64.sh                                            without programs, which PYTHON draws and this machine's kernels run
set -euo pipefail
cd "$(dirname "$0")/.."
CXX=${CXX:-aarch64-linux-gnu-g++}
RUN=${RUN-qemu-aarch64-static -cpu max -L /usr/aarch64-linux-gnu}
PYTHON=${PYTHON:-.venv/bin/python}
CMAKE=${CMAKE:-$(command -v .venv/bin/cmake || command -v cmake)}
NUM_PROGRAMS=${NUM_PROGRAMS:-80}
command -v "$CXX" > /dev/null || { echo "aarch64: skipped, there is no $CXX"; exit 0; }
build=$(mktemp -d)
trap 'rm -r "$build"' EXIT
for name in alone products_alone softmax_alone; do
    # shellcheck disable=SC2086
    "$CXX" -std=c++20 -O2 -static -Wall -Wextra -Wno-psabi -fno-math-errno -fno-trapping-math ${FLAGS:-} -I csrc \
        "tests/kernels/$name.cpp" -o "$build/$name"
    echo "$("$CXX" --version | head -1)${FLAGS:+, $FLAGS}: $($RUN "$build/$name")"
done
[[ -n $RUN && $NUM_PROGRAMS != 0 ]] || exit 0

"$CMAKE" --log-level=WARNING -S . -B "$build/cmake" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$CXX"
"$CMAKE" --build "$build/cmake" --target tarnn --parallel
export TARNN_BYTES_A_THREAD=0
PYTHONPATH=src:tests "$PYTHON" -m support.packed_programs "$build/programs" "$NUM_PROGRAMS"
logits() {  # compiler, folder of its library, suffix, what runs it
    "$1" -std=c++20 -O1 -pthread -I csrc tests/program/threads_alone.cpp "$2/libtarnn.so" -Wl,-rpath,"$(realpath "$2")" -o "$build/logits$3"
    ${4:-} "$build/logits$3" "$3" "$build"/programs/*.tarnn
}
TARNN_DOTS=none logits c++ src/tarnn/kernels/cpu .here  # rows are not rounded there either
logits "$CXX" "$build/cmake" .there "$RUN"
PYTHONPATH=src:tests "$PYTHON" -m support.same_logits "$build/programs"
