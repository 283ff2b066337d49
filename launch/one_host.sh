#!/usr/bin/env bash
# Trains on all accelerators of this host.
#
#   launch/one_host.sh --config=configs/quickstart.py --workdir=runs/quickstart
#
# Arguments go to `python -m jaxrl.launch`. PYTHON names the interpreter (default: the project's
# environment if it is there, else python3). DRY_RUN=1 only shows the command.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

run exec "$PYTHON" -m jaxrl.launch "$@"
