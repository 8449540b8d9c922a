# Every command a developer needs; `make help` explains them. Nothing but Python 3.11 or newer has to be there beforehand.
.DEFAULT_GOAL := help
SHELL := bash
# make bench-gpu PYTHON_IN=python3: with an interpreter that has the packages already, and nothing is installed.
PYTHON_IN := .venv/bin/python
PYTEST := $(PYTHON_IN) -m pytest
# What has this before it is the same on every machine: `make test-gpu` and `make bench-gpu` are for a GPU.
NO_GPU := CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1
# Test processes at a time. Most tests wait for sockets and processes more than they compute.
TEST_WORKERS ?= 3
# Bytecode is kept, whatever the environment says: the tests start hundreds of processes, and each would compile all sources.
TEST_ENV := $(NO_GPU) PYTHONDONTWRITEBYTECODE=
BENCHMARKS ?= system handoff gateway engine speculative end_to_end interference
# What needs vLLM, or is about it.
VLLM_TESTS ?= tests/worker/vllm tests/vllm
# What `make bench` writes, a JSON file for each benchmark; make bench HISTORY=1 also appends the ratios to the history.
BENCH_DIR ?= build/benchmarks
HISTORY ?=
# Where `make sbom` writes to, and the lock file of what it lists.
SBOM ?= build/sbom.cdx.json
LOCK ?= serve
# Flags for the command behind run, status, chat, test and bench: make run ARGS="--prefill 2 --decode 2"
ARGS ?=

.PHONY: help install install-dev install-vllm run status chat compat test test-all test-timing test-faults test-machines test-parallel test-troubles test-prices test-deploy test-rollout test-containers attack fuzz test-mutants test-gpu monitoring test-monitoring check-traces test-alert-mutants test-vllm check-model check images \
	format format-check lint types imports proto lock sbom proto-check proto-release bench bench-seeds bench-history bench-gpu demo-model clean clean-all

help: ## this list
	@echo "usage: make TARGET [ARGS=\"...\"]"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv with what serving needs; does nothing the second time
	@$(if $(filter command%,$(origin PYTHON_IN)),:,tools/install.sh)

install-dev: install ## add what tests and checks need; does nothing the second time
	@$(if $(filter command%,$(origin PYTHON_IN)),:,tools/install.sh dev)

install-vllm: ## make .venv-vllm, in which workers have vLLM: for CPUs, or for CUDA beside a GPU
	@tools/install.sh vllm

run: install ## serve the demo model on this machine: gateway, 1 prefill and 1 decode worker (ARGS: flags of tandem up)
	@exec $(PYTHON_IN) -m cli.main up $(ARGS)

status: install ## show the workers of the running cluster
	@$(PYTHON_IN) -m cli.main status $(ARGS)

chat: install ## talk to the running cluster
	@$(PYTHON_IN) -m cli.main chat $(ARGS)

test: install-dev ## the tests that every change must pass (ARGS: flags of pytest)
	$(TEST_ENV) $(PYTEST) -q -n $(TEST_WORKERS) --dist worksteal --durations=25 -m "not slow and not timing and not gpu and not deploy" $(ARGS)

test-all: install-dev ## all tests, the slow sweeps and all random examples too
	$(TEST_ENV) TANDEM_ALL_EXAMPLES=1 $(PYTEST) -q -n $(TEST_WORKERS) --dist worksteal -m "not timing and not gpu and not deploy" $(ARGS)
	$(if $(ARGS),,$(MAKE) --no-print-directory test-timing)

test-timing: install-dev ## the tests of real time, one at a time; run nothing else on the machine (ARGS: flags of pytest)
	$(TEST_ENV) $(PYTEST) -q -n 0 -m timing tests/timing $(ARGS)

compat: install-dev ## other people's clients and suites against one `tandem up`, and the proxies of docs/proxies.md; needs npm, nginx, haproxy and caddy (ARGS: names and flags; --help lists them)
	@$(NO_GPU) $(PYTEST) -q -n 0 -m deploy tests/compat
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.compat.run $(ARGS)

test-faults: install-dev ## kill, freeze, cut off, corrupt, and compare every answer (ARGS: cases and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.faults.run $(ARGS)

test-parallel: install-dev ## responses of workers of several ranks against those of one process, degree by degree; half an hour (ARGS: flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.parallel_sweep $(ARGS)

test-machines: install-dev ## a cluster on eight machines whose links are far, slow, lossy or cut (ARGS: scenarios and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.machines.run $(ARGS)

test-troubles: install-dev ## what each view says of Redis, machines and links in trouble (ARGS: troubles; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.machines.troubles $(ARGS)

test-prices: install-dev ## second tokens as predicted and as seen where one link is slow (ARGS: its rate and more; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.machines.prices $(ARGS)

test-containers: install-dev ## a cluster of containers: its answers, deaths, updates; needs podman, and `make images` of all four (ARGS: flags of pytest)
	@tools/deploy_tools.sh
	$(NO_GPU) $(PYTEST) -q -n 0 -s -m containers tests/containers $(ARGS)

attack: install-dev ## attack a cluster in every way that docs/security.md names (ARGS: attacks and flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.attack.run $(ARGS)

fuzz: install-dev ## 100,000 requests of nonsense over HTTP and as many over gRPC (ARGS: flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.fuzz.run $(ARGS)

test-deploy: install-dev ## the files in deploy/: every overlay with every component rendered and checked, and linters
	@tools/deploy_tools.sh
	$(NO_GPU) $(PYTEST) -q -n 0 -m "deploy and not slow" tests/deploy $(ARGS)

test-rollout: install-dev ## a rolling update under load as the manifests say, with a process in a network namespace for each pod
	@tools/deploy_tools.sh
	$(NO_GPU) $(PYTEST) -q -n 0 -m "deploy and slow" tests/deploy $(ARGS)

test-mutants: install-dev ## take each check of the handoff's receiver out and see that a test fails (ARGS: names)
	@$(NO_GPU) exec $(PYTHON_IN) tools/mutate_receiver.py $(ARGS)

check-model: install-dev ## the handoff as a model, with its fences and without each of them; needs spin and gcc
	@exec $(PYTHON_IN) tools/check_model.py $(ARGS)

RULES := deploy/kubernetes/components/monitoring/rules.yaml
monitoring: ## copy deploy/monitoring/rules.yml, without comments, into the PrometheusRule of deploy/kubernetes
	@sed '/^spec:$$/q' $(RULES) > $(RULES).new
	@sed '/^ *#/d; s/^./  &/' deploy/monitoring/rules.yml >> $(RULES).new
	@mv $(RULES).new $(RULES)

test-alert-mutants: install-dev ## check that promtool's tests notice every small change of an alert; needs promtool (ARGS: names)
	@exec $(PYTHON_IN) -m tests.monitoring.mutate $(ARGS)

test-monitoring: install-dev ## a real Prometheus with every rule and every dashboard on a cluster under load (ARGS: flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.monitoring.run $(ARGS)

check-traces: install-dev ## 1,000 traces of a cluster through a checker of their structure and conventions (ARGS: flags; --help lists them)
	@$(NO_GPU) exec $(PYTHON_IN) -m tests.traces.run $(ARGS)

test-gpu: install-dev ## the tests that need a CUDA device
	TRITON_INTERPRET=0 $(PYTEST) -q -n 0 -m gpu $(ARGS)

test-vllm: install-vllm ## the tests that need vLLM, in .venv-vllm (ARGS: flags of pytest)
	@$(TEST_ENV) .venv-vllm/bin/python -c "import vllm"
	$(TEST_ENV) .venv-vllm/bin/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS) $(VLLM_TESTS)

.PHONY: test-vllm-gpu
test-vllm-gpu: install-vllm ## the tests of vLLM on a GPU, in .venv-vllm (ARGS: flags of pytest)
	.venv-vllm/bin/python -m pytest -q -n 0 -m gpu $(ARGS) $(VLLM_TESTS)

check: install-dev ## everything that CI checks: format, lint, types, imports, protos, tests, tests with vLLM
	@.ci/run

images: ## build the container images of this work tree, and print their sizes (ARGS: which; deploy/images/README.md)
	@deploy/images/build.sh $(ARGS)

format: install-dev ## rewrite the sources in the project's format
	$(PYTHON_IN) -m ruff check --quiet --fix-only --select I .
	$(PYTHON_IN) -m ruff format .

format-check: install-dev ## whether `make format` would change anything
	$(PYTHON_IN) -m ruff format --check .

lint: install-dev ## ruff's rules, and the English of docstrings, comments, texts and pages
	$(PYTHON_IN) -m ruff check .
	$(PYTHON_IN) tools/prose.py
	$(PYTHON_IN) -m tools.prose_index

types: install-dev ## mypy, strict
	$(PYTHON_IN) -m mypy

imports: install-dev ## the layers and who may import what (import-linter)
	.venv/bin/lint-imports

proto: install-dev ## generate the stubs of protos/*.proto
	tools/protos.sh write

proto-check: install-dev ## whether the committed stubs are those of protos/*.proto, and break no program made for the last release
	tools/protos.sh check
	$(PYTHON_IN) tools/proto_compat.py check

proto-release: install-dev ## part of a release: from now on its public protos are the ones to keep to
	$(PYTHON_IN) tools/proto_compat.py release

lock: install-dev ## write requirements/*.lock anew after a change of pyproject.toml (ARGS: flags of uv, such as --upgrade)
	@tools/lock.sh $(ARGS)

sbom: install-dev ## the bill of materials of what serving installs, as CycloneDX JSON (SBOM: the file, LOCK: gateway or worker)
	@mkdir -p $(dir $(SBOM))
	@{ if grep -q '^safetensors==' requirements/$(LOCK).lock; then grep '^torch==' constraints.txt; fi; cat requirements/$(LOCK).lock; } | \
		$(PYTHON_IN) -W ignore::UserWarning -m cyclonedx_py requirements - --pyproject pyproject.toml --output-reproducible --of JSON -o $(SBOM)

bench: install-dev ## measure, with ratios to what is possible (BENCHMARKS: which, ARGS: their flags, HISTORY=1: keep the ratios)
	@mkdir -p $(BENCH_DIR); set -e; for name in $(BENCHMARKS); do \
		echo "== $$name"; \
		$(NO_GPU) $(PYTHON_IN) -m benchmarks.$$name --json $(BENCH_DIR)/$$name.json $(if $(HISTORY),--history) $(ARGS); \
	done

bench-seeds: install-dev ## every number that the project's plans name beside what is reached; some minutes (ARGS: parts, --write)
	@exec $(PYTHON_IN) -m benchmarks.seeds $(ARGS)

bench-history: install-dev ## the last ratios beside earlier ones of the same kind of machine; fails where one became worse
	@exec $(PYTHON_IN) -m benchmarks.history $(ARGS)

bench-gpu: install-dev ## measure the engine on a CUDA device beside what the device and transformers can do (ARGS: flags of both)
	@mkdir -p $(BENCH_DIR); set -e; for name in gpu gpu_batching; do \
		$(PYTHON_IN) -m benchmarks.$$name --json $(BENCH_DIR)/$$name.json $(ARGS); \
	done

demo-model: install-dev ## train the committed demo model and its draft again; takes an hour and a half
	$(PYTHON_IN) demo/train.py $(ARGS)

clean: ## remove caches and build outputs
	rm -rf {.,client}/{build,dist,*.egg-info} .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path './.venv*' -prune -o -path ./.tools -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

clean-all: clean ## remove the environments too
	rm -rf .venv .venv-vllm .tools
