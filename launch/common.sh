# Sourced by the scripts beside it: the interpreter, settings for accelerators, and DRY_RUN.
# shellcheck shell=bash

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; fi
fi
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
