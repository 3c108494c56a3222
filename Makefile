# Everything below sets itself up in .venv from a fresh clone; it needs python3 (3.10 or newer), make and a package index.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
REQUIRED ?= --constraint constraints.txt
WORKERS ?= auto

.PHONY: demo test test-more test-all test-torch suite fuzz lint bench docs clean

demo: $(VENV)/ready
	$(RUN) -m fusedadam demo

# Several workers share the cores: their threads must not wait for each other by spinning.
PYTEST := OMP_WAIT_POLICY=passive $(RUN) -m pytest -q -n $(WORKERS) --dist loadgroup

# Lint runs beside the tests; what it finds is printed last, where it is not overlooked.
test: $(VENV)/ready
	@found=$$(mktemp); $(MAKE) --no-print-directory lint >$$found 2>&1 & lint=$$!; $(MAKE) --no-print-directory suite; suite=$$?; \
	if wait $$lint; then lint=0; echo "lint: passed"; else lint=1; cat $$found; fi; rm -f $$found; exit $$((suite || lint))

suite: $(VENV)/ready
	$(PYTEST) -m "not exhaustive and not more"

# Commands, trainers, restarts, the site and the wheel as a whole.
test-more: $(VENV)/ready
	$(PYTEST) -m "more and not exhaustive"

test-all: lint
	$(PYTEST) --hypothesis-profile=random -o faulthandler_timeout=7200

# The suite with another torch, in an environment of its own, which may take gigabytes: make test-torch VERSION=2.6.0
test-torch:
	@test -n "$(VERSION)" || { echo "VERSION is missing, as in: make test-torch VERSION=2.6.0"; exit 2; }
	$(MAKE) suite test-more VENV=.venv-torch-$(VERSION) \
	  REQUIRED="torch==$(VERSION) $(addprefix --constraint ,$(wildcard constraints/torch-$(VERSION).txt))"

# Random programs beside torch.optim, other ones in each run; prints the shortest program that fails.
MINUTES ?= 60
fuzz: $(VENV)/ready
	OMP_WAIT_POLICY=passive $(RUN) -m tests.fuzz $(MINUTES)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(VENV)/ready
	$(RUN) -m fusedadam bench

# What follows from the code and from measured figures is written first. The theme's own news are not ours.
docs: $(VENV)/ready
	$(RUN) tools/reference.py
	$(RUN) tools/figures.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(VENV)/ready: pyproject.toml constraints.txt
	@echo "Setting up $(VENV), once: this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet $(REQUIRED) --editable ".[demo,bench,docs,test]"
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* build site .pytest_cache .mypy_cache .ruff_cache .hypothesis
