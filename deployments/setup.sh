#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and fetches the demo's model weights. May be run any number of times, also after
# an interruption: each step is skipped when its stamp says that it is done for these very pins.
set -euo pipefail
cd "$(dirname "$0")/.."

find_python() {
  for candidate in "${PYTHON:-}" python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"; return
    fi
  done
  echo "python: no Python 3.11 or 3.12 with the venv module found; install one or set PYTHON=/path/to/python3.11" >&2
  exit 2
}

say() { printf '\033[1m%s\033[0m\n' "$*"; }

venv=.venv
wanted=$(cat pyproject.toml deployments/constraints.txt deployments/setup.sh | sha256sum | cut -c1-16)
stamp=$venv/.pins-$wanted
if [ ! -e "$stamp" ]; then
  python=$(find_python)
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 || { rm -rf "$venv"; "$python" -m venv "$venv"; }
  pip=("$venv/bin/python" -m pip install --disable-pip-version-check --quiet --constraint deployments/constraints.txt)
  say "Installing pinned dependencies into $venv: about 0.8 GB with a CPU build of torch, 3.5 GB more with a CUDA build"
  # torch exactly and first: a range would take another build. CPU builds bring no triton, CUDA builds pin their own.
  "${pip[@]}" torch==2.13.0
  "$venv/bin/python" -c 'import triton' 2>/dev/null || "${pip[@]}" triton
  "${pip[@]}" --editable '.[engine,serve,flow,agents,weights,dev]'
  touch "$stamp"
fi
"$venv/bin/python" -m tideforge.flows.cli weights
