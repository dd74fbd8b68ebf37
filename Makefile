# What a developer does, one target each. Everything lives in .venv and in the cache directory (~/.cache/tricorn).

MODEL ?= smollm2-135m
PORT ?= 8000
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
NATIVE := $(wildcard native/*) CMakeLists.txt pyproject.toml

.PHONY: help setup serve test lint types format sanitize parity clients quality bench drill show console docs clean

help:  ## this list
	@grep -E '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 20

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "tricorn needs Python 3.11 or newer: apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old, tricorn needs 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) lacks its venv module: apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sysconfig, os, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo "the headers of $(PYTHON) are missing: apt install python3-dev" >&2; exit 1; }
	@$(PYTHON) -m venv .venv

# The build tools come as wheels; the compiler is the system's.
$(STAMP): .venv/bin/python $(NATIVE)
	@command -v $${CXX:-g++} >/dev/null || { echo "no C++ compiler found: apt install g++ (or set CXX)" >&2; exit 1; }
	@echo "installing tricorn into .venv (first time: a few minutes, most of them compiling the kernels)"
	@$(BIN)/pip install --quiet --disable-pip-version-check "scikit-build-core>=0.10" "nanobind>=2.4" "cmake>=3.20" ninja
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

.venv/.developer: $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[dev]"
	@touch $@

setup: $(STAMP)  ## make .venv, build the native extension; .venv/bin/tricorn is the command line

serve: $(STAMP)  ## serve MODEL (smollm2-135m) on 127.0.0.1:PORT (8000), fetching and compiling it when needed
	@$(BIN)/tricorn serve $(MODEL) --port $(PORT)

test: .venv/.developer  ## all tests, at most 15 minutes on two cores
	@$(BIN)/tricorn pull smollm2-135m
	@$(BIN)/python -m pytest

lint: .venv/.developer  ## ruff and clang-format
	@$(BIN)/ruff check src tests
	@$(BIN)/ruff format --check src tests
	@$(BIN)/clang-format --dry-run --Werror native/*.hpp native/*.cpp

types: .venv/.developer  ## mypy --strict on the package
	@$(BIN)/mypy

format: .venv/.developer  ## put everything into its format
	@$(BIN)/ruff check --fix src tests
	@$(BIN)/ruff format src tests
	@$(BIN)/clang-format -i native/*.hpp native/*.cpp

console: .venv/.developer  ## the console in a real browser; pictures of it in build/console
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { echo "no browser found: apt install chromium chromium-driver" >&2; exit 1; }
	@$(BIN)/tricorn pull smollm2-135m
	@$(BIN)/python -m pytest tests/test_console.py tests/test_console_browser.py

sanitize: .venv/.developer  ## the native tests under the address and undefined-behaviour sanitizers
	@tests/sanitize.sh

parity: .venv/.developer  ## the reference executor against transformers (installs PyTorch into .venv-parity)
	@test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	@.venv-parity/bin/pip install --quiet --disable-pip-version-check -r tests/parity/requirements.txt
	@PYTHONPATH=src .venv-parity/bin/python tests/parity/compare.py

clients: $(STAMP)  ## heavy clients as they come from the registry (in .venv-clients), against a real model
	@test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	@.venv-clients/bin/pip install --quiet --disable-pip-version-check -r tests/clients/requirements.txt
	@$(BIN)/tricorn pull smollm2-135m
	@TRICORN_PYTHON=$(BIN)/python PYTHONPATH=tests .venv-clients/bin/python -m pytest -c /dev/null --rootdir tests/clients --confcutdir tests/clients -p no:cacheprovider -q tests/clients

quality: .venv/.developer  ## the native executor against the reference on 2,000 positions of each built-in model
	@$(BIN)/tricorn bench quality

bench: $(STAMP)  ## the machine's limits, and the engine beside them
	@$(BIN)/tricorn bench machine
	@$(BIN)/tricorn bench engine --model $(MODEL)

drill: $(STAMP)  ## kill, stop and starve the engine of a real server under 64 streams: nothing may differ
	@$(BIN)/tricorn drill --model $(MODEL)

show: $(STAMP)  ## what is promised under load, in full (about an hour): storm, stalls, constraints, drill, soak, simulation
	@$(BIN)/tricorn bench storm --model $(MODEL)
	@$(BIN)/tricorn bench stalls --model $(MODEL)
	@$(BIN)/tricorn bench structured --model $(MODEL)
	@$(BIN)/tricorn drill --model $(MODEL)
	@$(BIN)/tricorn bench soak --model $(MODEL) --minutes 30
	@$(BIN)/tricorn bench simulate --seeds 250 --steps 4000

clean:  ## remove what was built and installed here (models and engines stay in the cache)
	@rm -rf .venv .venv-parity .venv-clients build .pytest_cache .mypy_cache .ruff_cache .hypothesis
