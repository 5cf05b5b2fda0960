# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check

# Bytecode is kept: else each of several hundred processes of the suite compiles three hundred modules, half a second.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup quickstart test test-wheels test-slurm test-all check lint docs clean

# Everything that developing needs. Does nothing when up to date.
setup: $(VENV)/.dev

# The package and what the quickstart needs. torch comes first and pinned, so that no other package pulls another build.
$(VENV)/.base: pyproject.toml requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' requirements.lock)
	$(PIP) -c requirements.lock -e '.[cli]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -c requirements.lock -e '.[dev]'
	touch $@

# A corpus, training on 4 CPU ranks, a resume, a report and a sample: one to three minutes after installation.
quickstart: $(VENV)/.base
	@PYTHON=$(BIN)/python examples/quickstart/run.sh

# Parts of the suite beside each other: most tests wait for other ranks or use one core. Of the tests marked `grid` as many
# as the budget has room for, chosen by the commit.
test: setup
	$(BIN)/python tools/run_tests.py -m "not full"

# Against megatron-core and lm-evaluation-harness, in environments beside .venv that are made once.
test-wheels: setup
	$(BIN)/python -m pytest tests/wheels

# On two nodes of a Slurm of the tests' own (tests/slurm/cluster.py). As root, which installs it where it is missing.
test-slurm: setup
	$(BIN)/python -m pytest tests/slurm -m slurm

# Full grids, kill storms, test-wheels and all of test-slurm too; the figures in docs/ come from it. A call stops behind the first test that
# ends after half an hour; the next one goes on.
test-all: setup
	$(BIN)/python -m pytest -p tests.harness.resumed

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_flags_docs.py --check
	$(BIN)/python tools/generate_tree.py --check
	$(BIN)/python tools/generate_schedule_docs.py --check
	$(BIN)/python tools/generate_interchange_docs.py --check
	$(BIN)/python tools/generate_cases_docs.py --check

check: lint test

# Pages, parts of pages and pictures that are made from code.
docs: setup
	$(BIN)/python tools/generate_flags_docs.py
	$(BIN)/python tools/generate_tree.py
	$(BIN)/python tools/generate_schedule_docs.py
	$(BIN)/python tools/generate_interchange_docs.py
	$(BIN)/python tools/generate_cases_docs.py

clean:
	rm -rf $(VENV) .venv-wheels .wheels build dist *.egg-info runs
