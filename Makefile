# Each target sets up .venv first.
#
# make run       train pFedBayes on small MNIST: a few minutes on two cores
# make test      run lint, type checks and tests: what CI runs
# make verify    run the slow tests
# make docs      build the documentation into site/
# make examples  run the examples and write their pages: a few minutes
# make bench     compare the speed with other implementations: at most 15 minutes on two cores
# make gpu-test  run the tests that need a GPU; from source, with the Python of the machine
# make lock      write requirements/*.txt again: versions and hashes of all dependencies
# make sbom      write sbom.cdx.json, the software bill of materials (CycloneDX)
# make clean     remove everything that the other targets created, except run folders

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --no-deps --only-binary :all: --require-hashes --requirement
# Idle OpenMP threads that spin make rounds take seconds on a busy machine; a moment of it saves waking them up.
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT := 500

# Install torch, which has several builds and therefore no hash; the locked dependencies, by hash; what this build of
# torch needs besides (the libraries of CUDA, or nothing); and the package.
define install
	$(1)/bin/python $(PIP) --no-deps --requirement requirements/torch.txt
	$(1)/bin/python $(LOCKED) requirements/$(2).txt
	$(1)/bin/python $(PIP) --requirement requirements/torch.txt
	$(1)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
endef

.PHONY: run test lint verify docs examples bench gpu-test lock sbom clean

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

# The source tree is enough: nothing is installed.
gpu-test:
	$(PYTHON) scripts/gpu_test.py $(ARGS)

lock: $(VENV)/installed-dev
	$(BIN)/python scripts/lock.py $(ARGS)

sbom: $(VENV)/installed-dev
	$(BIN)/python scripts/sbom.py sbom.cdx.json

$(VENV)-bench/installed: pyproject.toml requirements/torch.txt requirements/bench.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(call install,$(VENV)-bench,bench)
	@touch $@

$(VENV)/installed: pyproject.toml requirements/torch.txt requirements/run.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),run)
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements/dev.txt
	$(BIN)/python $(LOCKED) requirements/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench build dist site sbom.cdx.json .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
