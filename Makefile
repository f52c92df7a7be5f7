# make venv | demo | demo-gpu | test | test-long | lint | docs | bench | clean      (make help says what each does)
#
#   PYTHON=python3.12   the interpreter that makes .venv (3.11 or later)
#   SYSTEM_TORCH=1      keep the torch that this interpreter already has (a CUDA build, say); .venv remembers it
#
# A .venv that was there before is used as it is, and a torch in it is kept.

PYTHON ?= python3
SYSTEM_TORCH ?= $(if $(wildcard .venv/installed-system-torch-1),1,0)
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/installed-system-torch-$(SYSTEM_TORCH)
OTHER_STAMP := .venv/installed-system-torch-$(if $(filter 1,$(SYSTEM_TORCH)),0,1)
PIP := $(BIN)/python -m pip install -qq -c .venv/constraints.txt
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-gpu test test-long test-titan lint docs bench clean

help:
	@echo 'make venv       make .venv and install everything into it (repeated only when the versions change)'
	@echo 'make demo       train on real text, kill, resume, compare: the main job in a few minutes'
	@echo 'make demo-gpu   the same on one GPU or two, with the torch that PYTHON has; installs nothing'
	@echo 'make test       lint and the test suite, on $(WORKERS) workers'
	@echo 'make test-long  the tests that take minutes each'
	@echo 'make test-titan TorchTitan, into .titan, and the tests that run its trainer'
	@echo 'make lint       ruff and mypy'
	@echo 'make docs       the documentation as a site, in site/ (open site/index.html)'
	@echo 'make bench      what the contract costs, measured'
	@echo 'make clean      remove caches and build output (.venv and runs stay)'

venv: $(STAMP)

# One shell each, so that a failing check ends the recipe before anything is made.
$(STAMP): setup.cfg pyproject.toml constraints.txt
	@[ -x $(BIN)/python ] || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or later is needed, and $(PYTHON) is not that ($$($(PYTHON) --version 2>&1))." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
ifeq ($(SYSTEM_TORCH),1)
	@[ ! -x $(BIN)/python ] || [ -e $@ ] || [ -e $(OTHER_STAMP) ] || { \
	  echo "error: SYSTEM_TORCH=1 needs a new .venv, and there is one that make did not make: move it away" >&2; exit 2; }
	@$(PYTHON) -c 'import importlib.metadata as m, sys; v = m.version("torch"); print("keeping torch", v); \
	  sys.exit(tuple(int(n) for n in v.split(".")[:2]) < (2, 11))' 2>/dev/null || { \
	  echo "error: SYSTEM_TORCH=1, but $(PYTHON) has no torch of version 2.11 or later;" >&2; \
	  echo "install it there, or leave SYSTEM_TORCH out" >&2; exit 2; }
	@[ -e $@ ] || $(PYTHON) -m venv --clear --system-site-packages .venv
	@touch .venv/own-torch
else
	@if [ ! -x $(BIN)/python ] || [ -e $(OTHER_STAMP) ]; then $(PYTHON) -m venv --clear .venv; \
	  elif [ ! -e $@ ] && $(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; \
	  then touch .venv/own-torch; fi
endif
	@if [ -e .venv/own-torch ]; then grep -Ev '^(torch|triton)==' constraints.txt; else cat constraints.txt; fi > .venv/constraints.txt
	@echo 'installing into .venv (minutes the first time)'
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[wandb,plot,test,docs]'
	@touch $@

demo: venv
	$(BIN)/python -m tools.demo

# With the environment's own torch (and Transformer Engine, DEMO="--backend te"): no .venv, and nothing is installed.
demo-gpu:
	@$(PYTHON) -c 'import numpy, pydantic, safetensors, torch, yaml' || { \
	  echo "error: $(PYTHON) lacks a package (see above). Name another one: make demo-gpu PYTHON=..., or install what is" >&2; \
	  echo "missing there, beside your own torch: pip install numpy pydantic pyyaml safetensors sentencepiece matplotlib" >&2; exit 2; }
	$(PYTHON) -m tools.demo --device cuda $(DEMO)

test: lint
	$(PYTEST) -m 'not long'

test-long: venv
	$(PYTEST) -m long --timeout 1800

# TorchTitan needs older versions of a few packages: in a folder of their own, put first for these tests only.
.titan/stamp: tests/titan-requirements.txt | venv
	rm -rf .titan
	$(BIN)/python -m pip install -qq --no-deps --target .titan -r tests/titan-requirements.txt
	@touch $@

test-titan: venv .titan/stamp
	PYTHONPATH=.titan $(BIN)/python -m pytest --timeout 1800 tests/dist/test_torchtitan.py

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: venv
	$(BIN)/python -m tools.bench contract

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
