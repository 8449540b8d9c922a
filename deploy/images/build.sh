#!/usr/bin/env bash
# `deploy/images/build.sh [IMAGE…]`: builds container images from this work tree (`make images`); without names gateway, worker
# and valkey. Prints their sizes, and writes each one's bill of materials into build/images/.
#   TOOL=buildah|docker|podman  what builds; the first one that is installed if not given
#   BUILD=… BASE=…              the images to begin with; BUILD=debian makes both from Debian's packages with mmdebstrap, which is
#                               also done where the images that the Containerfiles name cannot be pulled
#   TORCH_INDEX=…               the index with torch's builds, such as https://download.pytorch.org/whl/cu130; empty: pip's settings
#   LOCK=vllm                   worker-vllm for processors; for GPUs if not given
#   TAG=…                       0.1.0 and so on, the project's version, if not given
set -euo pipefail
cd "$(dirname "$0")/../.."
source tools/index.sh

DEBIAN=bookworm
VERSION=$(sed -n "/^\[project\]/,/^\[/s/^version = \"\(.*\)\"/\1/p" pyproject.toml)
REVISION=$(git rev-parse HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo -modified)
TAG=${TAG:-$VERSION}
OUT=build/images

find_tool() {
    local candidate
    for candidate in ${TOOL:-buildah docker podman}; do
        if command -v "$candidate" >/dev/null; then echo "$candidate" && return; fi
    done
    echo "error: neither buildah nor docker nor podman is installed; install one or give TOOL=..." >&2
    exit 1
}

default_of() { # IMAGE ARGUMENT: what its Containerfile begins with
    sed -n "s/^ARG $2=//p" "deploy/images/$1/Containerfile" | head -1
}

size_of() { # IMAGE: its bytes
    case $tool in
    buildah) # the sum of its layers, as they are on the disk
        buildah inspect --type image --format '{{.Manifest}}' "$1" |
            python3 -c 'import json, sys; print(sum(layer["size"] for layer in json.load(sys.stdin)["layers"]))'
        ;;
    *) "$tool" image inspect --format '{{.Size}}' "$1" ;;
    esac
}

import_root() { # FOLDER IMAGE
    local path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    if [ "$tool" = buildah ]; then
        local container
        container=$(buildah from scratch)
        buildah add --quiet "$container" "$1" / >/dev/null
        buildah config --env "PATH=$path" "$container"
        buildah commit --quiet --rm "$container" "$2" >/dev/null
    else
        tar -C "$1" -c . | "$tool" import --change "ENV PATH=$path" - "$2" >/dev/null
    fi
}

has_image() { "$tool" inspect ${2:+--type "$2"} "$1" >/dev/null 2>&1; }

make_debian() { # two roots: one that compiles and installs, and one with nothing but what runs
    local root hook
    root=$(mktemp -d)
    trap 'rm -rf "$root"' RETURN
    if ! has_image localhost/tandem-debian-build:$DEBIAN; then
        echo "making a Debian root to build in"
        mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,g++,ca-certificates $DEBIAN "$root/build"
        import_root "$root/build" localhost/tandem-debian-build:$DEBIAN
    fi
    if ! has_image localhost/tandem-debian:$DEBIAN; then
        echo "making a Debian root to run in"
        # Extracted, not installed: no shell is needed, and none is there. Scanners read var/lib/dpkg/status.d.
        # shellcheck disable=SC2016 # the hook's shell is to expand these
        hook='set -e; cd "$1"; mkdir -p var/lib/dpkg/status.d tmp
            for deb in var/cache/apt/archives/*.deb; do dpkg-deb -f "$deb" > "var/lib/dpkg/status.d/$(dpkg-deb -f "$deb" Package)"; done
            mkdir -p etc/ssl/certs; cat usr/share/ca-certificates/mozilla/*.crt > etc/ssl/certs/ca-certificates.crt
            ln -sf python3.11 usr/bin/python3; ln -sf python3.11 usr/bin/python
            printf "root:x:0:0:root:/root:/sbin/nologin\ntandem:x:10001:10001::/nonexistent:/sbin/nologin\n" > etc/passwd
            printf "root:x:0:\ntandem:x:10001:\n" > etc/group
            rm -rf usr/share/doc usr/share/man usr/share/locale usr/share/perl* usr/lib/*/perl* usr/bin/perl* usr/bin/debconf* usr/sbin/debconf* \
                usr/bin/dpkg* usr/bin/update-alternatives usr/bin/openssl usr/bin/c_rehash bin/tar
            chroot . /usr/bin/python3.11 -m compileall -q /usr/lib/python3.11'
        mmdebstrap --quiet --variant=extract --include=python3.11-minimal,libpython3.11-stdlib,libstdc++6,libgomp1,ca-certificates,tzdata,netbase \
            --extract-hook="$hook" $DEBIAN "$root/run"
        import_root "$root/run" localhost/tandem-debian:$DEBIAN
    fi
}

write_secrets() { # how this machine installs Python packages, for the build alone
    local index
    {
        echo "[global]"
        echo "cert = /run/ca.crt"
        index=${PIP_INDEX_URL:-$(pip_setting index-url)}
        if [ -n "$index" ]; then echo "index-url = $index"; fi
        if [ ${#wheels[@]} -gt 0 ]; then echo "find-links = ${wheels[*]}"; fi
    } >"$secrets/pip.conf"
    cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$secrets/ca.crt"
}

build() { # IMAGE BUILD BASE
    local arguments=(--file "deploy/images/$1/Containerfile" --tag "localhost/tandem-$1:$TAG" --network host)
    arguments+=(--build-arg "BUILD=$2" --build-arg "BASE=$3" --build-arg "VERSION=$VERSION" --build-arg "REVISION=$REVISION")
    arguments+=(--secret "id=pip,src=$secrets/pip.conf" --secret "id=ca,src=$secrets/ca.crt")
    if [[ $1 = worker* ]] && [ -n "${TORCH_INDEX+given}" ]; then arguments+=(--build-arg "TORCH_INDEX=$TORCH_INDEX"); fi
    if [ "$1" = worker-vllm ] && [ -n "${LOCK:-}" ]; then arguments+=(--build-arg "LOCK=$LOCK"); fi
    if [ "$tool" = docker ]; then
        docker build "${arguments[@]}" .
        return
    fi
    for folder in "${wheels[@]}"; do arguments+=(--volume "$folder:$folder:ro"); done
    # Layers, so that the second build installs nothing; chroot, as a build needs no more of a container.
    "$tool" build --layers --isolation chroot "${arguments[@]}" .
}

tool=$(find_tool)
images=("$@")
if [ ${#images[@]} -eq 0 ]; then images=(gateway worker valkey); fi
for image in "${images[@]}"; do
    if [ ! -f "deploy/images/$image/Containerfile" ]; then
        echo "error: there is no deploy/images/$image/Containerfile" >&2
        exit 2
    fi
done

secrets=$(mktemp -d)
trap 'rm -rf "$secrets"' EXIT
wheels=()
for folder in $(pip_setting find-links); do
    if [ -d "${folder#file://}" ]; then wheels+=("${folder#file://}"); fi
done
write_secrets
if [ -z "${TORCH_INDEX+given}" ] && compgen -G "${wheels[0]:-/nonexistent}/torch-*-cp311-*.whl" >/dev/null; then TORCH_INDEX=; fi

list_packages() { # IMAGE: its bill of materials, where the tools of `make install-dev` are
    if [ -f "requirements/$1.lock" ] && .venv/bin/python -c 'import cyclonedx_py' 2>/dev/null; then
        make --silent --assume-old=install-dev sbom "LOCK=$1" "SBOM=$OUT/tandem-$1-$TAG.cdx.json"
    fi
}

mkdir -p $OUT
for image in "${images[@]}"; do
    build=${BUILD:-$(default_of "$image" BUILD)}
    base=${BASE:-$(default_of "$image" BASE)}
    if [ "$build" = debian ] || { ! has_image "$build" && ! timeout 60 "$tool" pull --quiet "$build" >/dev/null 2>&1; }; then
        if [ "$build" != debian ]; then echo "$build cannot be pulled: building on Debian's packages"; fi
        make_debian
        build=localhost/tandem-debian-build:$DEBIAN base=localhost/tandem-debian:$DEBIAN
        # What vLLM compiles, it compiles where it runs.
        if [ "$image" = worker-vllm ]; then base=$build; fi
    fi
    started=$SECONDS
    echo "building tandem-$image:$TAG on $base"
    build "$image" "$build" "$base"
    list_packages "$image"
    echo "built tandem-$image:$TAG in $((SECONDS - started)) s"
    printf '%s\t%s\t%s\n' "tandem-$image:$TAG" "$(size_of "localhost/tandem-$image:$TAG")" "$(size_of "$base")" >>"$secrets/sizes"
done
awk -F '\t' 'BEGIN {printf "%-28s %10s %18s\n", "image", "MB", "MB beyond its base"} {printf "%-28s %10.1f %18.1f\n", $1, $2/1e6, ($2-$3)/1e6}' "$secrets/sizes"
