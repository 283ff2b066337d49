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
#SBATCH --output=slurm-%j.log
# Trains on all nodes of a Slurm job, one process a node.
#
#   sbatch --nodes=4 --time=12:00:00 launch/slurm.sh --config=configs/my.py --workdir=runs/my
#
# Submit it from the repository's folder, which all nodes must see, as they must see the workdir.
# Five minutes before the time is over the run saves and ends with code 75; the job is then queued
# again and goes on. So it is when a process is killed or its node is lost, up to MAX_RESTARTS times
# (100). An error of the run itself ends the job. DRY_RUN=1 only shows the command.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
# shellcheck source=launch/common.sh
source launch/common.sh

code=0
# A process that is left over a minute after the first one ended, stopped say, is killed.
run srun --wait=60 "$PYTHON" -m jaxrl.launch --cluster=slurm "$@" || code=$?

# srun tells the highest code: 75 stopped and saved, 76 another process was lost, 128 + N killed by
# signal N. Everything else is an error, which would come again, or 69: every episode failed, and
# somebody has to look at the search engine first, 70: at a sign of collapse, or 78: a budget is spent. 130 is a second Ctrl-C:
# somebody wanted the end.
if [[ $code == 75 || $code == 76 || ($code -gt 128 && $code != 130) ]] &&
  [[ ${SLURM_RESTART_COUNT:-0} -lt ${MAX_RESTARTS:-100} ]]; then
  run scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
