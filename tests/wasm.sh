#!/usr/bin/env bash
# tarnn.wasm gives the bits of the same sources on this machine with vectors of 128 bits, compiled by the same compiler with the same C
# library (zig's): drawn programs of every kind of instruction, in float32, bfloat16, int8 and int4. Some five minutes; it takes node.
#
#   PYTHON=.venv/bin/python tests/wasm.sh     the Python that has ziglang, and tarnn with its kernels
#   ZIG=other/bin/python                      the one that has ziglang, where it is another
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
ZIG=${ZIG:-$PYTHON}
CMAKE=${CMAKE:-$(command -v .venv/bin/cmake || command -v cmake)}
NUM_PROGRAMS=${NUM_PROGRAMS:-80}
command -v node > /dev/null || { echo "wasm: skipped, there is no node"; exit 0; }
PYTHON=$ZIG CMAKE=$CMAKE scripts/wasm/build.sh

build=build/narrow
mkdir -p "$build"
export ZIG_GLOBAL_CACHE_DIR=$PWD/build/wasm-made/cache ZIG_LOCAL_CACHE_DIR=$PWD/build/wasm-made/cache
printf '#!/bin/sh\nexec "%s" -m ziglang c++ -target x86_64-linux-musl -mcpu=x86_64 "$@"\n' "$ZIG" > "$build/c++"
chmod +x "$build/c++"
# numbers below the smallest normal one stay, as in WebAssembly, which can't flush them
"$CMAKE" --log-level=WARNING -S . -B "$build" -DTARNN_ISAS=baseline -DCMAKE_CXX_COMPILER="$PWD/$build/c++" \
    -DCMAKE_CXX_FLAGS="-DTARNN_KEEP_DENORMALS -ffp-contract=off"
"$CMAKE" --build "$build" --target tarnn_for_c tarnn_sweep_baseline tarnn_table_baseline
find "$build/CMakeFiles"/tarnn_{for_c,sweep_baseline,table_baseline}.dir -name '*.o' -print0 |
    xargs -0 "$build/c++" -static -std=c++20 -O1 -I csrc tests/program/threads_alone.cpp -o "$build/logits"

programs=$(mktemp -d)
trap 'rm -r "$programs"' EXIT
PYTHONPATH=src:tests "$PYTHON" -m support.packed_programs "$programs" "$NUM_PROGRAMS"
"$build/logits" .native "$programs"/*.tarnn
node tests/program/logits.mjs src/tarnn/export/pages/tarnn.js src/tarnn/export/pages/tarnn.wasm .wasm "$programs"/*.tarnn
for file in "$programs"/*.tarnn; do
    cmp "$file.native" "$file.wasm" || { echo "wasm: $file has other bits"; exit 1; }
done
echo "wasm: $(find "$programs" -name '*.wasm' | wc -l) programs, the same bits"
