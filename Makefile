PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
INPUTS := pyproject.toml trainer/pyproject.toml constraints.txt
# pip would compile every package, on one core, in a minute. PyTorch and sympy are compiled here, the
# rest and this package when they are imported. One of PyTorch's files is for a newer Python and fails.
export PYTHONDONTWRITEBYTECODE :=
COMPILE = $(BIN)/python -m compileall -q -j $(JOBS) .venv/lib/*/site-packages/torch \
  .venv/lib/*/site-packages/sympy > /dev/null || true
INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile \
  --constraint constraints.txt --editable

.PHONY: test test-fast test-gpu types pytest compatibility matrix api features train format clean

test: .venv/test  ## lint, type-check and test, in an environment of its own
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory -j 2 types pytest

test-fast: .venv/test  ## lint, type-check and a quick part of every area of the tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@$(MAKE) --no-print-directory -j 2 types pytest SELECTED='-m "not slow"'

types:
	$(BIN)/mypy

pytest:
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(SELECTED) $(ARGS)

test-gpu:  ## the tests that need a GPU, with the Python at hand; a process per core, since they compile
	PYTHONPATH=src:trainer/src $(PYTHON) -m pytest tests trainer/tests -m gpu -n $(shell nproc) --dist worksteal -q \
	  -o addopts= -p no:cacheprovider $(ARGS)

compatibility: .venv/test  ## run what docs/integrations.md claims; write its table with the versions here
	$(BIN)/pytest -n $(JOBS) -m tries --compatibility $(ARGS)

matrix: .venv/test  ## run the tests with other versions; write their rows: make matrix CELLS=torch==2.11.0
	$(BIN)/python tests/support/compatibility.py --jobs $(JOBS) $(CELLS)

api: .venv/test  ## write docs/api.md from the source
	$(BIN)/python tests/support/api_reference.py

features: .venv/test  ## write docs/features.md from tests/features/feature_list.py
	$(BIN)/python tests/features/feature_table.py

train: .venv/train  ## train a small language model: make train ARGS="--help"
	$(BIN)/sonicmoe train $(ARGS)

format: .venv/test
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-cells build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps .venv/test and .venv/train are newer than what they were installed from.
.venv/test: $(INPUTS) | $(BIN)/python
	@echo "Installing sonicmoe[test] and sonicmoe-trainer into .venv"
	$(INSTALL) '.[test]' --editable ./trainer
	@$(COMPILE)
	@touch .venv/train $@

.venv/train: $(INPUTS) | $(BIN)/python
	@echo "Installing sonicmoe and sonicmoe-trainer into .venv"
	$(INSTALL) . --editable ./trainer
	@$(COMPILE)
	@touch $@

# An old pip takes 23 s longer to find the packages.
$(BIN)/python:
	$(PYTHON) -m venv --upgrade-deps .venv
