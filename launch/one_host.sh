#!/usr/bin/env bash
# Trains on all accelerators of this host.
#
#   launch/one_host.sh --config=configs/quickstart.py --workdir=runs/quickstart
#
# Arguments go to `python -m jaxrl.launch`. PYTHON names the interpreter (default: the project's
# environment if it is there, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
# A GPU's memory is taken at once and almost whole: nothing else should run on it.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
# Programs compiled once are found again by the next run with the same shapes.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/runs/compilation_cache}
exec "$PYTHON" -m jaxrl.launch "$@"
