# make venv | demo | test | test-long | lint | bench | clean      (make help says what each does)
#
#   PYTHON=python3.12   the interpreter that makes .venv (3.11 or later)
#   SYSTEM_TORCH=1      keep the torch that this interpreter already has (a CUDA build, say)

PYTHON ?= python3
SYSTEM_TORCH ?= 0
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/installed-system-torch-$(SYSTEM_TORCH)
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long lint bench clean

help:
	@echo 'make venv       make .venv and install everything into it (repeated only when the versions change)'
	@echo 'make demo       train on real text, kill, resume, compare: the main job in a few minutes'
	@echo 'make test       lint and the test suite, on $(WORKERS) workers'
	@echo 'make test-long  the tests that take minutes each'
	@echo 'make lint       ruff and mypy'
	@echo 'make bench      what the contract costs, measured'
	@echo 'make clean      remove caches and build output (.venv and runs stay)'

venv: $(STAMP)

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or later is needed; $(PYTHON) is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }
ifeq ($(SYSTEM_TORCH),1)
	@$(PYTHON) -c 'import importlib.metadata as m; print("keeping torch", m.version("torch"))' || { \
	  echo "error: SYSTEM_TORCH=1, but $(PYTHON) has no torch; install it there or leave SYSTEM_TORCH out" >&2; exit 2; }
	$(PYTHON) -m venv --clear --system-site-packages .venv
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
else
	$(PYTHON) -m venv --clear .venv
	cp constraints.txt .venv/constraints.txt
endif
	@echo 'installing into .venv (minutes the first time)'
	$(BIN)/python -m pip install -qq -c .venv/constraints.txt setuptools
	$(BIN)/python -m pip install -qq -c .venv/constraints.txt --no-build-isolation -e '.[wandb,plot,test]'
	@touch $@

demo: venv
	$(BIN)/python -m tools.demo

test: lint
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m 'not long'

test-long: venv
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m long --timeout 1800

lint: venv
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: venv
	$(BIN)/python -m tools.bench contract

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
