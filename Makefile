# Commands for people. `make` alone lists them. Works with GNU make 3.81 (a Mac's) and newer.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
RUNS := $(VENV)/.installed
TESTS := $(VENV)/.installed-dev

.PHONY: help setup setup-dev fetch run test lint format clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(RUNS) ## make .venv and install what the program needs

setup-dev: $(TESTS) ## the same, and what the tests need

fetch: setup ## fetch the default target, 93 MB, if it is missing
	@$(PY) -m confu_core fetch

run: setup ## start the app (the first start fetches the default target)
	@$(PY) app.py

# Two tests at a time; then, one by one, those with a browser, which keeps both cores busy, and those
# that hold the app to a time. Both parts run, and either fails the whole.
test: setup-dev lint fetch ## lint, then all tests
	@failed=0; set -x; \
	$(PY) -m pytest -m "not alone and not browser" -n 2 --dist worksteal || failed=1; \
	$(PY) -m pytest -m "alone or browser" || failed=1; \
	exit $$failed

lint: setup-dev ## style and likely mistakes
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup-dev ## put the code into the common form
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv and caches (the fetched target stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

# A .venv that was cut short has no pip; it is removed, so that the next try starts afresh.
$(PY):
	@command -v $(PYTHON) > /dev/null || { \
	  echo "$(PYTHON) was not found. Install Python 3.11 or newer."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is" `$(PYTHON) --version 2>&1`"."; \
	  echo "Name another one: make PYTHON=python3.12 setup"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
	  echo "This Python cannot make virtual environments."; \
	  echo "On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Stamps: a second `make setup` installs nothing unless the requirements changed.
$(RUNS): requirements.txt | $(PY)
	$(PY) -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

$(TESTS): requirements-dev.txt $(RUNS)
	$(PY) -m pip install --disable-pip-version-check -r requirements-dev.txt
	@touch $@
