# Each target sets up .venv first.
#
# make run       train pFedBayes on small MNIST: a few minutes on two cores
# make test      run lint, type checks and tests: what CI runs
# make verify    run the slow tests
# make docs      build the documentation into site/
# make examples  run the examples and write their pages: a few minutes
# make bench     compare the speed with other implementations: at most 15 minutes on two cores
# make clean     remove everything that the other targets created, except run folders

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Idle OpenMP threads that spin make rounds take seconds on a busy machine; a moment of it saves waking them up.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 500

.PHONY: run test lint verify docs examples bench clean

run: $(VENV)/installed
	$(BIN)/pfedbayes run $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

verify: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow --durations=0 -rA $(ARGS)

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

examples: $(VENV)/installed-dev
	$(BIN)/python scripts/write_examples.py $(ARGS)

# The peers pin other versions than the tools do, so they live apart.
bench: $(VENV)-bench/installed
	$(VENV)-bench/bin/python -m benchmarks $(ARGS)

$(VENV)-bench/installed: pyproject.toml constraints-bench.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-bench.txt \
		--editable '.[bench]'
	@touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev,docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
