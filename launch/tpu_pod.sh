#!/usr/bin/env bash
# Trains on a TPU pod slice. Start it on all hosts at once, from the same folder:
#
#   gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command='
#     cd jaxrl && launch/tpu_pod.sh --config=configs/my.py --workdir=/mnt/shared/runs/my'
#
# The hosts find one another through the TPU environment. All hosts must see the workdir. launch/gke.sh
# starts this script in the pods of a GKE job. DRY_RUN=1 only prints the command.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/common.sh
source launch/common.sh

run exec "$PYTHON" -m jaxrl.launch --cluster=tpu "$@"
