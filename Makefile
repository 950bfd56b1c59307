# Every target creates the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# The fleet stops when `make` dies, even if only `make` gets the signal.
DIE_WITH_MAKE = $(BIN)/python -I -S app/picker_tools/local_fleet/die_with_parent.py $$PPID SIGTERM
# Benches and long tests import helpers from the tests' folders.
WITH_TESTS = PYTHONPATH=tests:tests/fleet:tests/faults:tests/kubernetes:tests/unit:tests/scripts
BENCH = $(WITH_TESTS) $(BIN)/python -m bench
LONG = export $(WITH_TESTS); exec $(DIE_WITH_MAKE) $(BIN)/python -m long
# A fleet starts ten Python processes; without cached bytecode each process would compile the project.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help up demo load test redis-test kubernetes-test lint format bench bench-beside-go bench-fairness bench-benefit bench-lifecycle bench-refill bench-targets bench-limits bench-stages bench-objectives bench-large-pool bench-prefixes long chaos hostile compose-test vllm faults lock clean clean-cache

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

# pip checks each package's hash, as in the images (deploy/images/lock.sh).
INSTALL = PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet
$(VENV)/.local: pyproject.toml requirements-local.lock deploy/images/build.lock
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed; this is " + sys.version) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --require-hashes --requirement deploy/images/build.lock
	$(INSTALL) --require-hashes --requirement requirements-local.lock
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed: $(VENV)/.local requirements.lock
	$(INSTALL) --require-hashes --requirement requirements.lock
	@touch $@

up: $(VENV)/.local ## run a whole fleet here until Ctrl-C (ARGS='--replicas 5 --mode standard')
	@exec $(DIE_WITH_MAKE) $(BIN)/picker up $(ARGS)

demo: $(VENV)/.local ## a noisy client beside a quiet one, kills of a replica and of Redis, then an audit
	@exec $(DIE_WITH_MAKE) $(BIN)/picker load demo --own $(ARGS)

load: $(VENV)/.local ## send a load scenario and report kept promises (ARGS='noisy-neighbour'; ARGS=-h lists scenarios)
	@exec $(DIE_WITH_MAKE) $(BIN)/picker load $(or $(ARGS),noisy-neighbour)

# Six test files run at a time, because tests of whole fleets mostly wait. The folders with the longest tests come
# first, so that short tests fill the end.
test: $(VENV)/.installed ## all tests, on a real Valkey and a real Envoy (ARGS='-k name')
	bash .ci/packages
ifeq ($(ARGS),)
	$(BIN)/pytest -n 6 --dist loadfile --no-loadscope-reorder \
		tests/model tests/faults tests/fleet tests/scripts tests/unit
else
	$(BIN)/pytest $(ARGS)
endif

redis-test: $(VENV)/.installed ## tests of the Lua scripts and of their model, on Debian's redis-server
	PICKER_TEST_SERVER=redis-server $(BIN)/pytest tests/scripts tests/model tests/faults/test_redis_acl.py $(ARGS)

kubernetes-test: $(VENV)/.installed ## discovery and manifests against a real API server, built once (about ten minutes)
	@KUBERNETES_TEST_PARTS="$$(bash .ci/kubernetes)" && export KUBERNETES_TEST_PARTS && $(BIN)/pytest tests/kubernetes $(ARGS)

lint: $(VENV)/.installed ## ruff, mypy --strict, import-linter, luacheck, the budgets of lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	bash .ci/luacheck $(BIN)/python
	$(BIN)/python .ci/budgets

format: $(VENV)/.installed ## apply ruff's formatting and safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## what a request costs (ARGS='--beside ../other': another checkout too)
	$(BENCH).overhead $(ARGS)

bench-beside-go: $(VENV)/.installed ## what a request costs here and in the Go picker (ARGS='--go FILE')
	$(BENCH).overhead $(ARGS)

bench-fairness: $(VENV)/.installed ## is the shared queue fair? 1 to 8 replicas; control: a queue in each replica (ARGS=--quick)
	$(BENCH).fairness $(ARGS)

bench-benefit: $(VENV)/.installed ## does the queue help? simulated model servers at 60 to 200 % of their capacity
	$(BENCH).benefit $(ARGS)

bench-lifecycle: $(VENV)/.installed ## what a request and a fleet cost Redis, up to a million queued (ARGS=--quick)
	$(BENCH).lifecycle $(ARGS)

bench-refill: $(VENV)/.installed ## how long a freed place at a model server stays empty, in each mode (ARGS='--modes lean')
	$(BENCH).refill $(ARGS)

bench-targets: $(VENV)/.installed ## compare policy workload-aware with fcfs by the targets of specification 000
	$(BENCH).targets $(ARGS)

bench-limits: $(VENV)/.installed ## compare limits that the fleet finds with the best static bound (ARGS='mixed --replicas 2')
	$(BENCH).limits $(ARGS)

bench-stages: $(VENV)/.installed ## goodput by when requests are split between prefill and decode (ARGS='short')
	$(BENCH).stages $(ARGS)

bench-prefixes: $(VENV)/.installed ## prefix hits by learnt and fixed capacities of the engines' caches (ARGS='--only agents')
	$(BENCH).prefixes $(ARGS)

bench-objectives: $(VENV)/.installed ## how many requests meet latency objectives, compared with least-loaded picking
	$(BENCH).objectives $(ARGS)

bench-large-pool: $(VENV)/.installed ## compare costs of 1000 pods in an InferencePool with 10 (ARGS='--only pick')
	$(BENCH).large_pool $(ARGS)

long: $(VENV)/.installed ## a long test: chaos, soak, pulses, cluster-changes, load-tools, … (ARGS='soak --minutes 2')
	@$(LONG) $(ARGS)

chaos: $(VENV)/.installed ## long test: audit 200 000 requests among kills and changes; 500 schedules of faults; 2000 random runs
	@$(LONG) chaos $(ARGS)

hostile: $(VENV)/.installed ## long test: every attack at once, honest clients beside them (ARGS='--minutes 1')
	@$(LONG) hostile $(ARGS)

compose-test: $(VENV)/.installed ## long test: the Dockerfile and compose file on Docker or podman (ARGS=--no-build)
	@$(LONG) compose $(ARGS)

vllm: $(VENV)/.installed ## long test: real vLLM servers on the CPU behind the fleet (installs 6 GB once)
	@$(LONG) vllm $(ARGS)

faults: $(VENV)/.installed ## the fault suite in full; writes bench/results/faults.md (ARGS='-k killed')
	FAULT_SUITE=full $(BIN)/pytest tests/faults/cases $(ARGS)

lock: $(VENV)/.installed ## write the versions in use, with hashes, to requirements*.lock and deploy/images/*.lock
	deploy/images/lock.sh $(PYTHON) $(BIN)/pip
	cd deploy/images && ../../$(BIN)/python licences.py picker.lock edge.lock load.lock > licences.md

clean: ## remove the environment and caches of this checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

clean-cache: ## remove the files that checkouts share: vLLM (6 GB), load tools, Helm's renderer
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/picker-fleet"
