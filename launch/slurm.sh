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
# Trains on all nodes of a Slurm job, with one process per node.
#
#   sbatch --nodes=4 --time=12:00:00 launch/slurm.sh --config=configs/my.py --workdir=runs/my
#
# Submit it from the repository's folder. All nodes must see that folder and the workdir. Five minutes
# before the time limit the run saves and exits with code 75; the job is then requeued and resumes. It
# is also requeued if a process is killed or its node is lost, up to MAX_RESTARTS times (100). An error
# of the run itself ends the job. DRY_RUN=1 only prints the command.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"
# shellcheck source=launch/common.sh
source launch/common.sh

code=0
# Kill processes that still exist a minute after the first one ended, such as stopped ones.
run srun --wait=60 "$PYTHON" -m jaxrl.launch --cluster=slurm "$@" || code=$?

# srun returns the highest code: 75 stopped and saved, 76 another process was lost, 128 + N killed by
# signal N. Do not requeue on anything else: an error, which would recur; 69, all episodes failed and
# the search engine needs attention; 70, a sign of collapse; 78, a spent budget; 130, a second Ctrl-C.
if [[ $code == 75 || $code == 76 || ($code -gt 128 && $code != 130) ]] &&
  [[ ${SLURM_RESTART_COUNT:-0} -lt ${MAX_RESTARTS:-100} ]]; then
  run scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
