#!/bin/sh
# Fill wheels/ with what the image installs, in the versions of constraints.txt: 'make wheels' calls it with its Python.
# A build with PIP_OPTIONS=--no-index then needs no registry. Which torch that is depends on pip's own settings here:
# PIP_FIND_LINKS and PIP_EXTRA_INDEX_URL can name a place that has a CPU build.
set -eu
python=$1
cd "$(dirname "$0")/../.."
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "wheels.sh: the image has Python 3.11, so its wheels must come from one: make PYTHON=python3.11 wheels" >&2
    exit 1
}
PIP_CONSTRAINT=constraints.txt "$python" -m pip wheel --quiet --disable-pip-version-check --wheel-dir wheels \
    --find-links wheels '.[grammar]' hatchling
rm -f wheels/p2ptrain-*.whl # made from the sources, in the image
