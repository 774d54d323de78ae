# Every target sets itself up on a fresh machine: `make serve` is enough.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

.PHONY: venv serve test test-slow lint format clean

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "dspark-jax needs Python 3.12 or newer: set PYTHON=/path/to/python3.12 (found $$($(PYTHON) --version))"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[test,train,dev]'
	@touch $@

serve: venv
	$(BIN)/python examples/serve.py $(ARGS)

# A file stays with one worker: its models and engines are compiled once.
test: venv
	$(BIN)/python -m pytest -m 'not gpu and not slow' -n 2 --dist loadfile $(ARGS)

test-slow: venv
	$(BIN)/python -m pytest -m 'slow and not gpu' -n 2 --dist loadfile $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
