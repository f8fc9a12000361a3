# Everything runs from a fresh clone; nothing but a package registry is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
EXTRAS := dev,train,bench,real
# One worker per core, one thread each: two cores then finish in half the time.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: help install demo test test-all check bench real clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      install, write text with the shipped pair, measure the speed-up"
	@echo "make test      the quick suite          make test-all  with the slow checks"
	@echo "make check     format, lint, types, quick suite"
	@echo "make bench     the shipped pair, the common methods and transformers' own"
	@echo "make real TASKS=FILE   a real model: its tests, then Spec-Bench beside other engines (an hour or two);"
	@echo "               FILE: data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else 'foretoken needs Python 3.11 to 3.13; name one: make PYTHON=python3.11')"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

demo: install
	$(BIN)/python examples/demo.py

test: install
	$(PYTEST)

test-all: install
	$(PYTEST) -m "not gpu"

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST)

bench: install
	$(BIN)/foretoken bench --out runs/bench

# TASKS=FILE names the questions of Spec-Bench (a copy here or in a data folder beside is found), REAL="--dtype float32 --quick" and the like the rest.
TASKS ?= $(firstword $(wildcard spec-bench.jsonl ../*/data/spec-bench.jsonl))
real: install
	$(BIN)/foretoken minis get smollm2-135m
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real
	$(BIN)/python benchmarks/real.py $(if $(TASKS),--tasks $(TASKS)) $(REAL)

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
