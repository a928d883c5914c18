# One virtual environment for each Python; `make run` and `make test` set it up themselves.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(notdir $(PYTHON))
CONFIG ?= configs/digits.yaml
# Two worker processes suit two cores; more processes than cores only slow compilation down.
WORKERS ?= 2

.PHONY: run test setup lint types pytest conformance soak bench bench-peers clean

run: setup
	$(BIN)/jdist run $(CONFIG)

test: lint types pytest

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jdist needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m "not full and not soak"

conformance: setup
	$(BIN)/python -m pytest -n $(WORKERS) tests/conformance -m "full or not full"

soak: setup
	$(BIN)/python -m pytest -n $(WORKERS) -m soak

bench: setup
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/replica_check.py
	$(BIN)/python benchmarks/input.py

bench-peers: setup
	test -x .venv-tf/bin/python || $(PYTHON) -m venv .venv-tf
	.venv-tf/bin/python -m pip install --quiet --disable-pip-version-check tensorflow-cpu==2.21.0
	$(BIN)/python benchmarks/peers/mirrored.py --tensorflow-python .venv-tf/bin/python | tee benchmarks/peers/mirrored.log

clean:
	rm -rf .venv .venv-tf runs build *.egg-info
