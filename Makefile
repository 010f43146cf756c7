# Every target does the set-up it needs: a virtual environment in .venv, filled once from constraints.txt.

PYTHON ?= python3
GPU_PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS := 1
# Where an image sets it, each of some hundred processes that the tests start would compile every module anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help train test test-all lint fmt docs gpu-check bench clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test,lint,hf,search]'
	touch $@

train: $(READY)  ## the main job: train a byte-level GPT in two processes, write a report
	$(BIN)/pipeloom train $(ARGS)

test: $(READY)  ## the quick tests, three at a time as many wait; Hypothesis draws the same examples every time
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow and not gpu" --hypothesis-profile=quick $(ARGS)

test-all: $(READY)  ## all tests, the slow ones too; Hypothesis draws new examples
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" --hypothesis-profile=search $(ARGS)

lint: $(READY)  ## ruff, formatting, who may import whom, and mypy in strict mode on src
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

fmt: $(READY)  ## put imports in order and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## these pages and the Python reference as a site with search: build/docs/index.html
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[docs]'
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs . build/docs

# The environment above has torch's CPU build, so this target takes the machine's own Python.
gpu-check:  ## on a machine with a GPU or another accelerator, in 10 minutes: does all hold there that tests show on CPUs?
	@$(GPU_PYTHON) -c 'import torch, sys; sys.exit(not torch.accelerator.is_available())' 2>/dev/null || { \
	  echo "gpu-check: $(GPU_PYTHON) has no torch that sees an accelerator, so nothing was checked."; \
	  echo "Name a python that has one: make gpu-check GPU_PYTHON=/path/to/python"; exit 1; }
	PYTHONPATH="src:$$PYTHONPATH" $(GPU_PYTHON) -m pytest -m gpu -rs tests/gpu
	PYTHONPATH="src:$$PYTHONPATH" timeout 600 $(GPU_PYTHON) bench/gpu_check.py $(ARGS)

bench: $(READY)  ## throughput against one process and against torch.distributed.pipelining
	$(BIN)/python bench/throughput.py $(ARGS)

clean:  ## remove the virtual environment, caches and build outputs; runs/ is kept
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
