# A fresh machine needs Python 3.10 to 3.13 and make. `make demo` trains something real, `make test` passes the tests.
# Another Python: make setup PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: setup demo demo-chat test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt requirements-demo.txt
	@$(PYTHON) -c "import sys; v = sys.version_info; (3, 10) <= v < (3, 14) or sys.exit(f'Python {v[0]}.{v[1]} is not 3.10 to 3.13. Run: make setup PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps --require-hashes -r requirements-demo.txt
	touch $(STAMP)

demo: setup
	$(BIN)/trimtab demo

demo-chat: setup
	$(BIN)/trimtab demo chat

test: setup lint
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/lint-imports
	$(BIN)/pyright

clean:
	rm -rf $(VENV) build dist
