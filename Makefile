# Every command a developer needs; `make help` explains them. Nothing but Python 3.11 or newer has to be there beforehand.
.DEFAULT_GOAL := help
SHELL := bash
# make bench-gpu PYTHON_IN=python3: with an interpreter that has the packages already, and nothing is installed.
PYTHON_IN := .venv/bin/python
PYTEST := $(PYTHON_IN) -m pytest
# What has this before it is the same on every machine: `make test-gpu` and `make bench-gpu` are for a GPU.
NO_GPU := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
# Test processes at a time. Most tests wait for sockets and processes more than they compute.
TEST_WORKERS ?= 2
BENCHMARKS ?= system handoff gateway engine speculative end_to_end interference
# What `make bench` writes, a JSON file for each benchmark; make bench HISTORY=1 also appends the ratios to the history.
BENCH_DIR ?= build/benchmarks
HISTORY ?=
# Flags for the command behind run, status, chat, test and bench: make run ARGS="--prefill 2 --decode 2"
ARGS ?=

.PHONY: help install run status chat test test-all test-faults test-machines attack fuzz test-mutants test-gpu check-model check format format-check lint types imports proto \
	proto-check proto-release bench bench-history bench-gpu demo-model clean clean-all

help: ## this list
	@echo "usage: make TARGET [ARGS=\"...\"]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv with everything; does nothing the second time
	@$(if $(filter command%,$(origin PYTHON_IN)),:,tools/install.sh)

run: install ## serve the demo model on this machine: gateway, 1 prefill and 1 decode worker (ARGS: flags of tandem up)
	@exec $(PYTHON_IN) -m services.cli.main up $(ARGS)

status: install ## show the workers of the running cluster
	@$(PYTHON_IN) -m services.cli.main status $(ARGS)

chat: install ## talk to the running cluster
	@$(PYTHON_IN) -m services.cli.main chat $(ARGS)

test: install ## the tests that every change must pass (ARGS: flags of pytest)
	$(NO_GPU) $(PYTEST) -q -n $(TEST_WORKERS) -m "not slow and not gpu" $(ARGS)

test-all: install ## all tests, the slow sweeps and all random examples too
	$(NO_GPU) TANDEM_ALL_EXAMPLES=1 $(PYTEST) -q -n $(TEST_WORKERS) -m "not gpu" $(ARGS)

test-faults: install ## kill, freeze, cut off, corrupt, and compare every answer (ARGS: cases and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.faults.run $(ARGS)

test-machines: install ## a cluster on eight machines whose links are far, slow, lossy or cut (ARGS: scenarios and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.machines.run $(ARGS)

attack: install ## attack a cluster in every way that docs/security.md names (ARGS: attacks and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.attack.run $(ARGS)

fuzz: install ## 100,000 requests of nonsense over HTTP and as many over gRPC (ARGS: flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.fuzz.run $(ARGS)

test-mutants: install ## take each check of the handoff's receiver out and see that a test fails (ARGS: names)
	@$(NO_GPU) exec $(PYTHON_IN) tools/mutate_receiver.py $(ARGS)

check-model: install ## the handoff as a model, with its fences and without each of them; needs spin and gcc
	@exec $(PYTHON_IN) tools/check_model.py $(ARGS)

test-gpu: install ## the tests that need a CUDA device
	TRITON_INTERPRET=0 $(PYTEST) -q -n 0 -m gpu $(ARGS)

check: install ## everything that CI checks: format, lint, types, imports, protos, tests
	@.ci/run

format: install ## rewrite the sources in the project's format
	$(PYTHON_IN) -m ruff check --quiet --fix-only --select I .
	$(PYTHON_IN) -m ruff format .

format-check: install ## whether `make format` would change anything
	$(PYTHON_IN) -m ruff format --check .

lint: install ## ruff's rules
	$(PYTHON_IN) -m ruff check .

types: install ## mypy, strict
	$(PYTHON_IN) -m mypy

imports: install ## the layers and who may import what (import-linter)
	.venv/bin/lint-imports

proto: install ## generate the stubs of protos/*.proto
	tools/protos.sh write

proto-check: install ## whether the committed stubs are those of protos/*.proto, and break no program made for the last release
	tools/protos.sh check
	$(PYTHON_IN) tools/proto_compat.py check

proto-release: install ## part of a release: from now on its public protos are the ones to keep to
	$(PYTHON_IN) tools/proto_compat.py release

bench: install ## measure, with ratios to what is possible (BENCHMARKS: which, ARGS: their flags, HISTORY=1: keep the ratios)
	@mkdir -p $(BENCH_DIR); set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(NO_GPU) $(PYTHON_IN) -m benchmarks.$$name --json $(BENCH_DIR)/$$name.json $(if $(HISTORY),--history) $(ARGS); \
	done

bench-history: install ## the last ratios beside earlier ones of the same kind of machine; fails where one became worse
	@exec $(PYTHON_IN) -m benchmarks.history $(ARGS)

bench-gpu: install ## measure the engine on a CUDA device beside what the device and transformers can do (ARGS: flags of both)
	@mkdir -p $(BENCH_DIR); set -e; for name in gpu gpu_batching; do \
		$(PYTHON_IN) -m benchmarks.$$name --json $(BENCH_DIR)/$$name.json $(ARGS); \
	done

demo-model: install ## train the committed demo model and its draft again; takes an hour and a half
	$(PYTHON_IN) demo/train.py $(ARGS)

clean: ## remove caches and build outputs
	rm -rf {.,client}/{build,dist,*.egg-info} .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -path ./.tools -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

clean-all: clean ## remove the environments too
	rm -rf .venv .tools
