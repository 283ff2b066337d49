# Sourced by the other scripts: the interpreter, settings for accelerators, and DRY_RUN.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  for folder in "$ROOT" "$PWD"; do
    if [[ -x $folder/.venv/bin/python ]]; then PYTHON=$folder/.venv/bin/python; fi
  done
fi
# Makes the package and the shipped configurations importable from any folder.
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$ROOT
# JAX allocates almost all of a GPU's memory at the start: run nothing else on it.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

# Prints a command in shell syntax with DRY_RUN=1; otherwise runs it. `run exec …` replaces the shell,
# which would otherwise keep signals from the command.
run() {
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}
