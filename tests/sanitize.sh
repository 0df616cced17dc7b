#!/usr/bin/env bash
# The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer: a library of their own in build/sanitize,
# and the tests that run it, in one process; and threads, of a step and of programs, under ThreadSanitizer. The first finding ends it.
#
#   tests/sanitize.sh            threads; 3,000 drawn calls, tests of kernels, ops, programs and prompts, with each instruction set  (make nightly)
#   tests/sanitize.sh --short    threads; 300 drawn calls, tests of prompts and damaged programs, with the richest one
#   tests/sanitize.sh -k packed  what pytest is told
#
# PYTHON, CMAKE and CXX name other programs. It takes GCC on Linux: the sanitizers have to be there before Python is.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-.venv/bin/python}
CMAKE=${CMAKE:-$(command -v .venv/bin/cmake || command -v cmake)}
CXX=${CXX:-c++}
runtime=$("$CXX" -print-file-name=libasan.so 2> /dev/null || true)
if [[ $runtime != /* ]]; then
    echo "sanitize: skipped, it takes GCC on Linux, and $CXX has no libasan.so"
    exit 0
fi
threads() {  # the helpers of a fused step, in a program of their own: Python itself would need to be built for it
    mkdir -p build
    "$CXX" -std=c++20 -O1 -g -fsanitize=thread -pthread -I csrc tests/kernels/team_alone.cpp csrc/runtime/team.cpp \
        -o build/team_alone
    TSAN_OPTIONS=halt_on_error=1 build/team_alone
}
programs_by_threads() {  # the runtime of programs, by its C interface
    "$CMAKE" --log-level=WARNING -S . -B build/threads -DCMAKE_CXX_COMPILER="$CXX" -DTARNN_SANITIZE=thread
    "$CMAKE" --build build/threads --target tarnn --parallel
    "$CXX" -std=c++20 -O1 -g -fsanitize=thread -pthread -I csrc tests/program/threads_alone.cpp build/threads/libtarnn.so \
        -Wl,-rpath,"$PWD/build/threads" -o build/threads_alone
    PYTHONPATH=tests "$PYTHON" -m support.packed_programs build/threads/programs 80
    TARNN_BYTES_A_THREAD=0 TSAN_OPTIONS=halt_on_error=1 build/threads_alone build/threads/programs/*
}
[[ $# == 0 || $1 == --short ]] && threads
[[ $# == 0 ]] && programs_by_threads

build=build/sanitize checks=address,undefined
if [[ ${1:-} == --short ]]; then  # without the four (null, alignment, object-size, pointer-overflow) that take minutes to compile
    build=build/sanitize-short
    checks=address,bounds,shift,signed-integer-overflow,integer-divide-by-zero,nonnull-attribute,bool,enum,return,unreachable
fi
"$CMAKE" --log-level=WARNING -S . -B "$build" -DCMAKE_CXX_COMPILER="$CXX" -DTARNN_SANITIZE=$checks
"$CMAKE" --build "$build" --parallel

# Python leaks at exit, by design. libstdc++ is loaded first too, or the runtime misses the throw that it has to watch.
# (Stack use after return is not looked for: its frames lie at 32 bytes, and vectors of 64 would fault there, GCC bug 110027.)
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:detect_stack_use_after_return=0
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TARNN_BINARY=$PWD/$build/libtarnn_cpu.so TARNN_KERNELS=required OMP_NUM_THREADS=2
preload="$runtime $("$CXX" -print-file-name=libstdc++.so.6)"

sanitized() {
    LD_PRELOAD=$preload "$PYTHON" "$@"
}
suite() {  # what compiles is left out: the sanitizers would follow into the compiler
    sanitized -m pytest -q -x -p no:cacheprovider --timeout=1200 -m "not compile" "$@"
}
whole_models=(tests/conversion/test_fused.py tests/huggingface/test_foreign_forward.py)
drawn() {
    sanitized tests/fuzz.py --unjudged --calls "$1"
    for op in delta "low rank" "diagonal scan" "selective scan" convolution hybrid; do
        sanitized tests/fuzz.py "$op" --unjudged --calls "$(($1 / 2))"
    done
}

case "${1:-}" in
    --short) drawn 300 && suite tests/decoding/fused/test_prefill.py tests/program/test_damaged_programs.py tests/program/test_c_api.py ;;
    "") some=
        for isa in baseline avx2 avx512 avx512bf16; do
            if ! TARNN_ISA=$isa sanitized -c 'from tarnn.kernels.cpu import library; library.status()' 2> /dev/null; then
                echo "sanitize: $isa is not for this processor" && continue
            fi
            echo "sanitize: $isa" && some=$isa
            TARNN_ISA=$isa drawn 3000
            TARNN_ISA=$isa suite tests/kernels tests/ops tests/program tests/decoding/fused tests/decoding/test_draws.py "${whole_models[@]}"
        done
        [[ -n $some ]] || { echo "sanitize: this processor has none of the library's instruction sets"; exit 1; } ;;
    *) suite "$@" ;;
esac
echo "sanitize: nothing found"
