#!/usr/bin/env bash
#SBATCH --job-name=jaxrl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=runs/slurm-%j.log
# Trains on all nodes of a Slurm job, one process a node.
#
#   sbatch --nodes=4 --time=12:00:00 launch/slurm.sh --config=configs/my.py --workdir=runs/my
#
# Submit it from the repository's folder, which all nodes must see, as they must see the workdir.
# Five minutes before the time is over the run saves and ends with code 75; the job is then queued
# again and goes on. So it is after a node is lost (76). DRY_RUN=1 only shows the command.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
# shellcheck source=launch/common.sh
source launch/common.sh

code=0
# One task that ends badly ends the others, also those that are stopped and cannot do it themselves.
run srun --kill-on-bad-exit=1 "$PYTHON" -m jaxrl.launch --cluster=slurm "$@" || code=$?
if [[ $code == 75 || $code == 76 ]]; then
  run scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
