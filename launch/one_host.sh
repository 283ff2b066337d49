#!/usr/bin/env bash
# Trains on all accelerators of this host, from the current folder.
#
#   launch/one_host.sh --config=configs/quickstart.py --workdir=runs/quickstart
#   ~/jaxrl/launch/one_host.sh --config=my_run.py --workdir=runs/my_run
#
# Arguments go to `python -m jaxrl.launch`. PYTHON names the interpreter (default: that of .venv in
# the current folder, else in the repository, else python3). DRY_RUN=1 only prints the command.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

run exec "$PYTHON" -m jaxrl.launch "$@"
