#!/usr/bin/env bash
# Generates the stubs of protos/*.proto: `tools/protos.sh write` beside them, `tools/protos.sh check` compares only.
# The client's distribution gets copies of the public ones, and has one .proto of its own; its Request has the fields of
# SamplingParams.
# The generator lives in an environment of its own (.tools/gen), because it needs an older protobuf than the services use.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/index.sh

GENERATOR=requirements/protos.lock
STAMP=.tools/gen/.installed
CLIENT=client/tandem_client/protos
PUBLIC=(inference cluster) # these import no other .proto, so their messages' stubs work in any package

make_generator() {
    if cmp -s "$GENERATOR" "$STAMP"; then return; fi
    echo "making .tools/gen with $GENERATOR"
    [ -x .tools/gen/bin/python ] || .venv/bin/python -m venv .tools/gen
    if .venv/bin/python -m uv --version >/dev/null 2>&1; then
        (use_index_settings_of_pip && .venv/bin/python -m uv pip install --quiet --python .tools/gen/bin/python \
            --require-hashes -r "$GENERATOR")
    else
        .tools/gen/bin/python -m pip install --quiet --require-hashes -r "$GENERATOR"
    fi
    cp "$GENERATOR" "$STAMP"
}

generate() { # into folder $1
    PATH="$PWD/.tools/gen/bin:$PATH" .tools/gen/bin/python -m grpc_tools.protoc -I. \
        --python_out="$1" --grpc_python_out="$1" --mypy_out="$1" --mypy_grpc_out="$1" protos/*.proto 2> >(grep -v "^Writing mypy" >&2 || true)
    mkdir -p "$1/client"
    PATH="$PWD/.tools/gen/bin:$PATH" .tools/gen/bin/python -m grpc_tools.protoc -Iclient \
        --python_out="$1/client" --mypy_out="$1/client" "$CLIENT"/*.proto 2> >(grep -v "^Writing mypy" >&2 || true)
    for name in "${PUBLIC[@]}"; do cp "$1/protos/${name}_pb2.py" "$1/protos/${name}_pb2.pyi" "$1/$CLIENT/"; done
}

stubs() { (cd "$1" && ls protos/*_pb2*.py protos/*_pb2*.pyi "$CLIENT"/*_pb2*.py "$CLIENT"/*_pb2*.pyi); }

case "${1:-}" in
write)
    make_generator
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh" # not in place: what is there stays where a .proto has an error
    rm -f {protos,"$CLIENT"}/*_pb2*.py {protos,"$CLIENT"}/*_pb2*.pyi
    cp "$fresh"/protos/* protos/
    cp "$fresh/$CLIENT"/* "$CLIENT/"
    .venv/bin/python tools/client_fields.py
    ;;
check)
    make_generator
    fresh=$(mktemp -d)
    trap 'rm -rf "$fresh"' EXIT
    generate "$fresh"
    status=0
    diff <(stubs "$fresh") <(stubs .) || status=1
    for stub in $(stubs "$fresh"); do diff -q "$fresh/$stub" "$stub" || status=1; done
    .venv/bin/python tools/client_fields.py --check || status=1
    [ "$status" = 0 ] || { echo "error: the stubs differ from protos/*.proto; run make proto" >&2; exit 1; }
    ;;
*)
    echo "usage: tools/protos.sh write|check" >&2
    exit 2
    ;;
esac
