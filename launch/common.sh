# Sourced by the scripts beside it: the interpreter, settings for accelerators, and DRY_RUN.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  for folder in "$ROOT" "$PWD"; do
    if [[ -x $folder/.venv/bin/python ]]; then PYTHON=$folder/.venv/bin/python; fi
  done
fi
# The package, and shipped configurations for one another, from whatever folder a script is started.
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$ROOT
# A GPU's memory is taken at once and almost whole: nothing else should run on it.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}

# With DRY_RUN=1, prints a command as the shell would read it; otherwise runs it. `run exec …` leaves
# no shell behind, which would keep signals from the command.
run() {
  if [[ ${DRY_RUN:-0} == 1 ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}
