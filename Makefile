# SPDX-License-Identifier: Apache-2.0
# `make` alone explains the targets. Each of them sets up the environment by itself first.

# Another vLLM gets an environment of its own. Not `?=`: a variable VLLM in the environment is
# the command that examples/serve.sh runs.
VLLM   =
VENV  ?= .venv$(addprefix -,$(VLLM))
SHAPE ?= llava-1.5
ARGS  ?=

BIN = $(VENV)/bin

# Only for who has not set them. The memory for the KV cache counts on a CPU alone.
export VENV
unexport VLLM
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
# Their models are made here: waiting for a hub would only cost time.
demo test test-fast test-engine rehearse sweep soak bench bench-serve: export HF_HUB_OFFLINE ?= 1
# Some virtual machines announce AMX, but end a process that uses it with an illegal instruction.
# This keeps oneDNN below it, and changes nothing on a processor without AMX.
demo test test-fast test-engine rehearse sweep soak bench bench-serve: export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

# The stages of `make test` come one after the other, and each uses both cores by itself.
.NOTPARALLEL:
.PHONY: help setup demo serve test test-fast test-engine rehearse sweep soak lint bench bench-serve \
	docs wheel clean

help: ## this text
	@echo "anchorprune-vllm: visual-token pruning for vLLM"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "New here?     make demo"
	@echo "Your model:   make serve MODEL=llava-hf/llava-1.5-7b-hf BUDGET=64"
	@echo "One test:     make test ARGS='-k anchor'"
	@echo "Other Python: make setup PYTHON=python3.12"
	@echo "Other vLLM:   make test VLLM=0.33.0"

setup: ## virtual environment in .venv: some minutes the first time, then nothing
	@VERSION=$(VLLM) docker/setup_venv.sh

demo: setup ## serve a tiny model with pruning, ask it at several budgets, print a table
	@$(BIN)/anchorprune demo $(ARGS)

# MODEL, BUDGET and the others come from the command line, which make passes on by itself.
serve: setup ## an OpenAI-compatible server with pruning (MODEL, BUDGET, PORT, ARGS)
	@VLLM=$(BIN)/vllm ANCHORPRUNE=$(BIN)/anchorprune examples/serve.sh -- $(ARGS)

test: lint test-fast test-engine ## lint, then fast tests, then tests on a real engine (ARGS go to pytest)

test-fast: setup ## the tests that start no engine (ARGS go to pytest)
	$(BIN)/python -m pytest -m "not engine and not rehearsal" --timeout=300 $(at_once) $(ARGS) $(or_none_chosen)

test-engine: setup ## the tests on a real engine (ARGS go to pytest)
	$(BIN)/python -m pytest -m engine $(at_once) $(ARGS) $(or_none_chosen)

# Most tests keep one core busy. Which stay together is in tests/conftest.py.
at_once = -n 2
# Threads that wait for each other on the same two cores would cost more than they bring. Numba's
# too: when its pool starts, it gives all of the process its own number of threads.
test test-fast test-engine rehearse sweep soak: export OMP_NUM_THREADS ?= 1
test test-fast test-engine rehearse sweep soak: export NUMBA_NUM_THREADS ?= 1
test test-fast test-engine rehearse sweep soak: export VLLM_CPU_OMP_THREADS_BIND ?= nobind

# pytest exits with 5 when ARGS choose no test of a stage. That fails only a run without ARGS.
or_none_chosen = $(if $(ARGS),|| [ $$? -eq 5 ])

rehearse: setup ## vLLM's CUDA platform on a simulated GPU: needs a C++ compiler (ARGS go to pytest)
	@$(BIN)/python -m tests.simcuda.build
	$(BIN)/python -m pytest -p tests.simcuda.pytest_plugin $(at_once) tests/simcuda tests/rehearsal $(ARGS)

sweep: setup ## serve all tiny checkpoints, unpruned and pruned, and write docs/models.md
	@$(BIN)/python -m tests.sweep $(ARGS)

soak: setup ## thousands of mixed requests to each main model equal their cold answers (ARGS)
	@$(BIN)/python -m tests.soak $(ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: setup ## what pruning costs in time and memory, part by part
	@$(BIN)/anchorprune bench parts $(ARGS)

bench-serve: setup ## a server under load, unpruned and pruned (SHAPE, ARGS)
	@$(BIN)/anchorprune bench serve --shape $(SHAPE) $(ARGS)

# Without vLLM: an environment of its own, with the extra `docs` alone.
docs: .venv-docs/.complete ## this documentation as a site in site/, with all links checked
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

.venv-docs/.complete: pyproject.toml
	@$(or $(PYTHON),python3) -m venv .venv-docs
	@.venv-docs/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' >.venv-docs/requirements.txt
	@.venv-docs/bin/python -m pip --disable-pip-version-check install --quiet -r .venv-docs/requirements.txt
	@touch $@

wheel: setup ## sdist and wheel in dist/, checked, installed in a clean environment and tried
	@rm -rf build dist
	@$(BIN)/python -m build
	@$(BIN)/python -m twine check --strict dist/*
	@$(BIN)/python docker/try_wheel.py dist/*.whl

clean: ## remove what the targets made, .venv included
	rm -rf $(VENV) $(VENV).lock .venv-docs site .demo .check bench-results .*_cache .hypothesis
	rm -rf build dist *.egg-info
