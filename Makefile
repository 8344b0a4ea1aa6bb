# Two commands: `make pretrain` sets up and runs the main job, `make test` sets up and runs the tests.
# Both make .venv once (again when pyproject.toml changes). PYTHON names the interpreter to build it from.

PYTHON ?= python3
VENV   ?= .venv
CONFIG ?= configs/mqar.yaml
ARGS   ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help env pretrain test test-gpu test-cluster clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

env: $(READY)  ## make the virtual environment

# A CUDA torch weighs several GB. Where there is no NVIDIA driver and pip would fetch one, torch comes from
# PyTorch's CPU builds instead; uv knows where those are. Where pip would take a CPU build anyway, pip takes it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; assert v >= (3, 11), f"Python {v.major}.{v.minor} found, 3.11 or newer needed: make PYTHON=python3.11 ..."'
	$(PYTHON) -m venv $(VENV)
	@if ! command -v nvidia-smi >/dev/null 2>&1 && ! $(BIN)/python -c 'import torch' 2>/dev/null \
	    && $(BIN)/pip install --quiet --dry-run --report - 'torch>=2.11,<2.14' 2>/dev/null | grep -qE '"name": "(nvidia|cuda)-'; then \
	  echo "no NVIDIA driver found: installing the CPU build of torch"; \
	  $(BIN)/pip install --quiet uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu 'torch>=2.11,<2.14'; \
	fi
	@echo "installing into $(VENV): about 2 GB without a GPU, a minute or two"
	$(BIN)/pip install --quiet -e '.[test]'
	@touch $@

pretrain: $(READY)  ## train (CONFIG=configs/mqar.yaml, ARGS="--dotted.key value ...")
	$(BIN)/python -m recipes.pretrain --config $(CONFIG) $(ARGS)

test: $(READY)  ## all tests that need no GPU
	$(BIN)/python -m pytest -q $(ARGS)

test-gpu: $(READY)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -q -m gpu $(ARGS)

test-cluster: $(READY)  ## many processes, faults and a SLURM of two virtual nodes (Debian: slurmctld slurmd slurm-client munge)
	$(BIN)/python -m pytest -q -m cluster -rs $(ARGS)

clean:  ## remove the virtual environment (runs and stores stay)
	rm -rf $(VENV)
