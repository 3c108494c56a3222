# Everything below sets itself up in .venv from a fresh clone; it needs python3 (3.10 or newer), make and a package index.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= auto

.PHONY: demo test test-all lint bench clean

demo: $(VENV)/ready
	$(RUN) -m fusedadam demo

# Several workers share the cores: their threads must not wait for each other by spinning.
PYTEST := OMP_WAIT_POLICY=passive $(RUN) -m pytest -q -n $(WORKERS)

test: lint
	$(PYTEST) -m "not exhaustive"

test-all: lint
	$(PYTEST)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/ready
	$(RUN) benchmarks/speed.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[demo,bench,test]"
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
