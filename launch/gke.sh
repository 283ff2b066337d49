#!/usr/bin/env bash
# Starts a job on a TPU slice of Google Kubernetes Engine, one pod a host.
#
#   IMAGE=… CLAIM=… launch/gke.sh --config=configs/my.py --workdir=/shared/runs/my
#
#   IMAGE           container image with this repository in /jaxrl and its packages installed:
#                   launch/Dockerfile makes it
#   CLAIM           persistent volume claim, mounted at /shared in every pod (ReadWriteMany)
#   NAME            of the job (jaxrl)
#   ACCELERATOR     node label cloud.google.com/gke-tpu-accelerator (tpu-v5-lite-podslice)
#   TOPOLOGY        node label cloud.google.com/gke-tpu-topology (4x4)
#   NUM_HOSTS       hosts of the slice (4)
#   CHIPS_PER_HOST  (4)
#   ENVIRONMENT     names of variables of this shell whose values the pods get, as "SEARCH_URL TZ";
#                   they stand in the manifest, so keys of providers belong into SECRETS
#   SECRETS         variables from secrets of the cluster, as "SERPER_API_KEY=search" (secret search,
#                   its key SERPER_API_KEY) or "WANDB_API_KEY=logs:wandb-key"
#   CACHE           folder on the claim for what is kept between jobs, as compiled programs
#                   (/shared/cache)
#
# A pod that is stopped, killed or lost is replaced, up to 100 times and with growing pauses, and the
# run goes on from its newest checkpoint; since the others end too when one is lost, they come together
# again. An error of the run itself (1) and a search engine that is down (69), a sign of collapse (70) or a spent budget (78) end the job; docs/resume.md
# has the exit codes. Rules by exit code need Kubernetes 1.26. DRY_RUN=1 only shows the manifest.
set -euo pipefail
: "${IMAGE:?set IMAGE to the container image}" "${CLAIM:?set CLAIM to the volume claim}"
NAME=${NAME:-jaxrl}
ACCELERATOR=${ACCELERATOR:-tpu-v5-lite-podslice}
TOPOLOGY=${TOPOLOGY:-4x4}
NUM_HOSTS=${NUM_HOSTS:-4}
CHIPS_PER_HOST=${CHIPS_PER_HOST:-4}

CACHE=${CACHE:-/shared/cache}

refuse() {
  printf 'error: %s\n' "$1" >&2
  exit 1
}

# A text as YAML reads it back, whatever it holds.
quoted() {
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"}
  text=${text//$'\n'/\\n}
  printf '"%s"' "${text//$'\t'/\\t}"
}

arguments=$(for argument in "$@"; do printf '            - %s\n' "$(quoted "$argument")"; done)

variable='[A-Za-z_][A-Za-z0-9_]*'
environment="            - {name: XDG_CACHE_HOME, value: $(quoted "$CACHE")}"
for name in ${ENVIRONMENT:-}; do
  [[ $name =~ ^$variable$ ]] ||
    refuse "ENVIRONMENT has '$name'; expected names of variables, as \"SEARCH_URL TZ\"."
  [[ -n ${!name+set} ]] || refuse "ENVIRONMENT names $name, which is not set; export it, or leave it out."
  environment+=$'\n'"            - {name: \"$name\", value: $(quoted "${!name}")}"
done
for entry in ${SECRETS:-}; do
  [[ $entry =~ ^($variable)=([a-z0-9.-]+)(:([-._A-Za-z0-9]+))?$ ]] ||
    refuse "SECRETS has '$entry'; expected NAME=secret or NAME=secret:key, of a secret in the cluster."
  name=${BASH_REMATCH[1]}
  secret="{name: \"${BASH_REMATCH[2]}\", key: \"${BASH_REMATCH[4]:-$name}\"}"
  environment+=$'\n'"            - {name: \"$name\", valueFrom: {secretKeyRef: $secret}}"
done

manifest=$(
  cat <<YAML
apiVersion: v1
kind: Service
metadata:
  name: $NAME
spec:
  clusterIP: None
  selector:
    job-name: $NAME
---
apiVersion: batch/v1
kind: Job
metadata:
  name: $NAME
spec:
  completionMode: Indexed
  completions: $NUM_HOSTS
  parallelism: $NUM_HOSTS
  backoffLimit: 100
  podFailurePolicy:
    rules:
      # These would come again: an error, every episode failed, somebody ended it.
      - action: FailJob
        onExitCodes:
          containerName: jaxrl
          operator: In
          values: [1, 69, 70, 78, 130]
  template:
    spec:
      subdomain: $NAME
      restartPolicy: Never  # the job makes another pod, unless the rules above end it
      # On SIGTERM the run saves; a kill follows after this time.
      terminationGracePeriodSeconds: 300
      nodeSelector:
        cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
        cloud.google.com/gke-tpu-topology: $TOPOLOGY
      containers:
        - name: jaxrl
          image: $IMAGE
          command: [/jaxrl/launch/tpu_pod.sh]
          args:
$arguments
          env:
$environment
          ports:
            - containerPort: 8482
          resources:
            limits:
              google.com/tpu: $CHIPS_PER_HOST
          volumeMounts:
            - name: shared
              mountPath: /shared
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: $CLAIM
YAML
)

if [[ ${DRY_RUN:-0} == 1 ]]; then
  printf '%s\n' "$manifest"
else
  kubectl apply --filename=- <<<"$manifest"
fi
