# Two targets a newcomer needs: `make demo` and `make test`. Everything lands in .venv and runs/.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := torch==2.13.0

.PHONY: demo quick test test-all coverage format sanitize pages gpu install wheel clean

demo: install
	$(BIN)/tarnn demo --out runs/demo

# one thread a worker: two that wait for each other by spinning are slower than one
quick test test-all: export OMP_NUM_THREADS = 1

# before each commit, in less than a minute of one core: the rules of the house, and the laws at small sizes
quick: install
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -m "not compile and not refusals and not thorough and not slow" tests/test_house.py tests/ops tests/feature_maps tests/attention

# how long each test took: build/tests.xml
test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 -q -m "not slow" --junitxml=build/tests.xml

# and what is slow and rarely breaks: GPU kernels by Triton's interpreter, the laws under a runtime type checker
test-all: test
	$(BIN)/python -m pytest -n 2 -q -m slow --junitxml=build/slow_tests.xml
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 -q tests/triton/interpreted
	$(BIN)/python -m pytest -n 2 -q -m "not compile and not refusals and not slow" --jaxtyping-packages=tarnn.ops,tarnn.feature_maps,tarnn.attention,beartype.beartype tests/ops tests/feature_maps tests/attention

# which lines no test runs: build/coverage/index.html; takes longer than `make test`
coverage: export OMP_NUM_THREADS = 1
coverage: install
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -m "not compile"
	$(BIN)/coverage combine
	$(BIN)/coverage html --directory build/coverage

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the kernels' tests under the sanitizers, with each instruction set
sanitize: install
	tests/sanitize.sh

# all of benchmarks/results anew, on a quiet machine; stopped, it goes on
pages: install
	$(BIN)/python benchmarks/all.py

# on a machine with a GPU, whose torch and Triton are the ones that PYTHON has: the op's laws, then the pages of results
gpu:
	$(PYTHON) -m pytest -q tests/triton tests/ops
	$(PYTHON) benchmarks/gpu_attention.py
	$(PYTHON) benchmarks/gpu_decode.py

install: $(VENV)/.installed $(VENV)/.kernels

# one file for every Python and every torch from 2.10 on, in dist/: `pip install dist/tarnn-*.whl` installs it
wheel:
	TARNN_KERNELS=required $(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

# The pinned torch first: a bare range would bring gigabytes of CUDA. Then this package; its kernels are compiled
# apart, where one sees what goes wrong.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"tarnn needs Python 3.11 or newer; this is {sys.version}. Set PYTHON=python3.x"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip cmake ninja
	$(BIN)/python -m pip install --quiet $(TORCH)
	TARNN_KERNELS=off $(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

$(VENV)/.kernels: $(VENV)/.installed CMakeLists.txt $(wildcard csrc/* csrc/*/*)
	@if command -v "$${CXX:-c++}" > /dev/null; then \
	    $(BIN)/cmake --log-level=WARNING -S . -B build/dev -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	        -DTARNN_IN_PLACE=ON && $(BIN)/cmake --build build/dev && touch $@; \
	else echo "No C++ compiler ($${CXX:-c++}): attention will run in plain PyTorch, several times slower."; fi

clean:
	rm -rf build dist src/tarnn/kernels/cpu/*.so $(VENV)/.kernels .pytest_cache .ruff_cache .mypy_cache .hypothesis
