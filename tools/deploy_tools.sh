#!/usr/bin/env bash
# Makes .tools/deploy with what `make test-deploy` checks deploy/ with: kubectl, linters, and schemas. Every package is of the
# version and has one of the hashes that requirements/deploy.lock and requirements/crds/package-lock.json name. Does nothing the
# second time. Schemas of custom resources need npm; without it their tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/index.sh

TOOLS=.tools/deploy
STAMP=$TOOLS/.installed

wanted_stamp() {
    { pwd; command -v npm || true; cat requirements/deploy.lock requirements/crds/package-lock.json tools/deploy_tools.sh; } | sha256sum
}

if [ -f $STAMP ] && [ "$(cat $STAMP)" = "$(wanted_stamp)" ]; then exit 0; fi
started=$SECONDS
rm -rf $TOOLS
.venv/bin/python -m venv --without-pip $TOOLS
use_index_settings_of_pip
.venv/bin/python -m uv pip install --quiet --python $TOOLS/bin/python --no-deps --require-hashes --only-binary :all: -r requirements/deploy.lock
if command -v npm >/dev/null; then
    mkdir $TOOLS/crds
    cp requirements/crds/package*.json $TOOLS/crds/
    # --force: the packages ask for a newer Node than they need.
    npm ci --silent --force --ignore-scripts --no-audit --no-fund --prefix $TOOLS/crds
fi
wanted_stamp >$STAMP
echo "installed the tools of make test-deploy in $((SECONDS - started)) s"
