# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup quickstart test test-all check lint docs clean

setup: $(STAMP)

# Pinned torch first, from the lock, so that no other package can pull another build of it.
$(STAMP): pyproject.toml requirements.lock setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check $$(grep '^torch==' requirements.lock)
	$(BIN)/pip install -q --disable-pip-version-check -c requirements.lock -e '.[dev]'
	touch $(STAMP)

test: setup
	$(BIN)/python -m pytest -m "not full"

test-all: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

check: lint test

clean:
	rm -rf $(VENV) build dist *.egg-info runs
