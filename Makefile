# make train   makes the environment and runs the main job: Flow-GRPO on the shapes world
# make test    makes the environment and runs lint, types and tests
# make test-kernels [TESTS=tests/flow]   the tests under other matrix kernels and numbers of threads
# Each works alone on a fresh checkout; what is done is not done again.

PYTHON ?= python3
TORCH ?= "torch==2.14.1" "torchvision==0.29.1"
BIN := .venv/bin
RUN ?= runs/shapes
TESTS ?= tests
KERNELS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 OMP_NUM_THREADS=2

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false

.PHONY: train test test-kernels lint types install clean

# a finished run is left alone, a stopped one goes on
train: .venv/.installed
	@if [ -f $(RUN)/summary.md ]; then echo "$(RUN) is done: see $(RUN)/summary.md, or delete the folder to run again"; \
	elif ls $(RUN)/checkpoints/*/manifest.json >/dev/null 2>&1; then $(BIN)/flowrl train --resume $(RUN); \
	else $(BIN)/flowrl train output_dir=$(RUN); fi

test: export PYTHONWARNDEFAULTENCODING = 1
test: .venv/.installed-dev lint types
	$(BIN)/python -m pytest

# what another processor computes: it adds in another order
test-kernels: .venv/.installed-dev
	@for kernel in $(KERNELS); do \
		echo "== $$kernel"; env $$kernel $(BIN)/python -m pytest -q -x $(TESTS) || exit 1; \
	done

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed-dev
	$(BIN)/mypy

install: .venv/.installed

clean:
	rm -rf .venv build *.egg-info

# torch and torchvision in one call: a pair that is known to fit
.venv/.installed: pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH) -e .
	touch $@

.venv/.installed-dev: .venv/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@
