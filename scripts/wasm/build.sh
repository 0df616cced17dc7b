#!/usr/bin/env bash
# Build tarnn.wasm, where `tarnn export --format web` looks for it. About four minutes for the first time.
#
#   PYTHON=.venv/bin/python scripts/wasm/build.sh     the Python that has ziglang (pip install ziglang)
set -euo pipefail
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build/wasm}
CMAKE=${CMAKE:-$(command -v .venv/bin/cmake || command -v cmake)}
"$CMAKE" --log-level=WARNING -S . -B "$BUILD" -DTARNN_WASM=ON -DCMAKE_SYSTEM_NAME=Generic -DCMAKE_CXX_COMPILER="$PWD/scripts/wasm/c++" \
    -DCMAKE_CXX_FLAGS_RELEASE=-DNDEBUG
"$CMAKE" --build "$BUILD" --target tarnn.wasm
cp "$BUILD/tarnn.wasm" src/tarnn/export/pages/tarnn.wasm
chmod 644 src/tarnn/export/pages/tarnn.wasm
echo "tarnn.wasm: $(wc -c < "$BUILD/tarnn.wasm") bytes, $(gzip -9 -c "$BUILD/tarnn.wasm" | wc -c) in gzip"
