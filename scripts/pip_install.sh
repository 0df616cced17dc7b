#!/usr/bin/env bash
# Install packages by pip, with the versions in the file $LOCK if it is set. Where a version can't be had, name it and the remedy.
#
#   LOCK=constraints.txt scripts/pip_install.sh .venv/bin/python torch
set -euo pipefail
python=$1
shift
mkdir -p build
"$python" -m pip install ${LOCK:+--constraint "$LOCK"} "$@" > build/pip.log 2>&1 && exit
grep -v ^WARNING build/pip.log | tail -n 20 >&2
if [[ -n ${LOCK:-} ]]; then
    package=$(sed -n -e 's/.*No matching distribution found for //p' -e 's/.*The user requested (constraint) //p' build/pip.log | tail -n 1)
    echo "pip can't install ${package:-what it names above}, which $LOCK names, with $("$python" --version) on $(uname -sm)." \
        "make install LOCK= installs the newest versions that pyproject.toml allows." >&2
fi
exit 1
