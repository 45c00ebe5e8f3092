#!/usr/bin/env bash
# Makes the environment of the peer and of the fixtures: `.venv` at the repository's root. Does nothing if it is there.
# Prints the interpreter, so that a script can say: python=$(bench/peer/setup.sh)
set -euo pipefail
cd "$(dirname "$0")"

venv=$(cd ../.. && pwd)/.venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
if ! "$venv/bin/python" -c 'import torch, transformers, safetensors' 2>/dev/null; then
    "$venv/bin/python" -m pip install --quiet --requirement requirements.txt >&2
fi
echo "$venv/bin/python"
