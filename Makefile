# Each target works alone from a bare clone: it makes .venv, installs the package into it, and runs.
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# Processes that share the tests: several of the tests start two to four of their own.
WORKERS ?= 2

# One thread per process: the tests start several processes, and machines have few cores.
export OMP_NUM_THREADS ?= 1
# Processes that tests start load what the first of them has compiled, also where the shell says otherwise.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format types imports test-core test-all test-slow test-gpu mutants clean

help:            ## these lines
	@grep -hE '^[a-z-]+: *.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Shardwright needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

install: $(STAMP)  ## make .venv with the package, both frameworks and the tools

demo: $(STAMP)     ## GPT-2 in both frameworks: captured, planned, trained, compared
	$(PY) examples/demo.py

test: $(STAMP)     ## lint, types, import contract, then the tests: the core first
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory imports
	@$(MAKE) --no-print-directory test-all

lint: $(STAMP)     ## ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(STAMP)   ## let ruff repair what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(STAMP)    ## strict mypy
	$(PY) -m mypy

imports: $(STAMP)  ## the import contract
	$(VENV)/bin/lint-imports

test-core: $(STAMP)  ## the quick tests that need no framework, within a minute or so
	$(PY) -m pytest tests/core -m "not slow and not thorough" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# One run, so that there is one closing line; tests/conftest.py orders the files. One process: make test-all WORKERS=0.
test-all: $(STAMP)   ## every ordinary test
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP)  ## the heavy checks
	$(PY) -m pytest -m slow

test-gpu: $(STAMP)   ## the checks that need a CUDA device
	$(PY) -m pytest -m gpu

mutants: $(STAMP)    ## 150 small errors in the core, one at a time: do the tests notice 90% of them?
	$(PY) benchmarks/mutants.py --jobs $(WORKERS)

clean:           ## remove what was built, and .venv
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo_output
