# A fresh machine needs Python 3.10 to 3.13 and make. `make demo` trains something real, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo demo-chat test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements-demo.txt
	touch $(STAMP)

demo: setup
	$(BIN)/trimtab demo

demo-chat: setup
	$(BIN)/trimtab demo chat

test: setup lint
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build dist
