# Everything runs in the checkout's own virtual environment, made on first use.
PYTHON := .venv/bin/python
PYTEST := $(PYTHON) -m pytest
export PYTHONPATH :=
# What of tests/e2e depends on the engine's version.
ENGINE_TESTS := $(addprefix tests/e2e/test_,moved_request.py neighbours.py in_flight.py \
	deaths.py pending.py lengths.py)

.PHONY: help setup older demo test check lint fast-tests faults test-engines bench clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## create .venv with the engine (on a machine with GPUs: make setup ENGINE=cuda)
	@scripts/setup $(if $(ENGINE),--engine $(ENGINE))

older: setup ## create .venv-0.27, with an earlier release of the engine
	@scripts/setup --engine cpu-0.27

demo: setup ## two replicas, a pool, a router: what moves, with the pool off and on
	@.venv/bin/millpond demo $(ARGS)

lint: setup
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check --quiet .
	@.venv/bin/lint-imports --no-cache >build/lint-imports.log || { cat build/lint-imports.log; exit 1; }
	@$(PYTHON) -m pyright

fast-tests: setup
	@$(PYTEST) tests/unit tests/property tests/meta

check: setup ## ruff, pyright, layers; unit, property and meta tests; side by side
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint fast-tests

faults: lint ## with real daemons, processes and sockets
	@$(PYTEST) -p no:cacheprovider -m "not engines" tests/faults

test: older ## everything that needs no GPU: check and faults, side by side; e2e
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target faults fast-tests
	@$(PYTEST) -m "not engines" tests/e2e tests/gpu

test-engines: older ## e2e tests and long sweeps on every supported CPU engine
	@.venv-0.27/bin/python -m pytest $(ENGINE_TESTS)
	@$(PYTEST) tests/e2e

bench: setup ## measure everything; writes report/bench.json (make bench QUICK=1: that it runs)
	@$(PYTHON) scripts/bench.py $(if $(QUICK),--quick) $(ARGS)

clean: ## remove all that make made
	rm -rf .venv .venv-0.27 build dist report .hypothesis .pytest_cache .ruff_cache
	find src tests scripts benchmarks -name __pycache__ -prune -exec rm -rf {} +
