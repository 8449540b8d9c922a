#!/usr/bin/env bash
# Writes requirements/*.lock: every package with its version and the hashes of all its files, for each system and Python
# that we serve on. Versions that are there already stay; ARGS for uv, such as --upgrade, change that. No address of an
# index is written, so any mirror will do. torch is left out: tools/install.sh says why.
set -euo pipefail
cd "$(dirname "$0")/.."

source tools/index.sh
use_index_settings_of_pip
unset UV_FIND_LINKS # a folder of wheels has those of one machine
# The options are the same for all; what is compiled and into which file follows.
lock() {
    .venv/bin/python -m uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
        --no-emit-find-links --no-emit-package torch --custom-compile-command "make lock" "$@"
}

mkdir -p requirements
serving=(--extra worker --extra local --extra gpu -c constraints.txt pyproject.toml)
lock "$@" "${serving[@]}" -o requirements/serve.lock
# What serves is chosen first; tools for development have to do with it.
lock "$@" "${serving[@]}" -c requirements/serve.lock --group dev -o requirements/dev.lock
# What container images hold: all of it is what serves, too.
lock "$@" -c requirements/serve.lock pyproject.toml -o requirements/gateway.lock
lock "$@" -c requirements/serve.lock -c constraints.txt --extra worker --extra gpu pyproject.toml -o requirements/worker.lock
lock "$@" requirements/install.in -o requirements/install.lock
lock "$@" requirements/protos.in -o requirements/protos.lock
# What vLLM asks for and cannot have beside what serves stands in its overrides: no resolver would find a way otherwise.
for build in vllm vllm-cuda; do
    lock "$@" "${serving[@]}" "requirements/$build.in" -c requirements/serve.lock \
        --override "requirements/$build.overrides" -o "requirements/$build.lock"
done
# What checks deploy/ has an environment of its own.
lock "$@" requirements/deploy.in -o requirements/deploy.lock
(cd requirements/crds && npm install --silent --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --force)
