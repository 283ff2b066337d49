#!/usr/bin/env bash
# Starts a job on a TPU slice of Google Kubernetes Engine, with one pod per host.
#
#   IMAGE=… CLAIM=… launch/gke.sh --config=configs/my.py --workdir=/shared/runs/my
#
#   IMAGE           container image with this repository in /jaxrl and its packages installed;
#                   launch/Dockerfile builds it
#   CLAIM           persistent volume claim, mounted at /shared in every pod (ReadWriteMany)
#   NAME            name of the job (jaxrl)
#   ACCELERATOR     node label cloud.google.com/gke-tpu-accelerator (tpu-v5-lite-podslice)
#   TOPOLOGY        node label cloud.google.com/gke-tpu-topology (4x4)
#   NUM_HOSTS       number of hosts in the slice (4)
#   CHIPS_PER_HOST  number of chips per host (4)
#   ENVIRONMENT     names of shell variables to pass to the pods, such as "SEARCH_URL TZ"; their
#                   values appear in the manifest, so put API keys in SECRETS
#   SECRETS         variables from the cluster's secrets, such as "SERPER_API_KEY=search" (key
#                   SERPER_API_KEY of the secret search) or "WANDB_API_KEY=logs:wandb-key"
#   CACHE           folder on the claim for files shared between jobs, such as compiled programs
#                   (/shared/cache)
#
# A pod that is stopped, killed or lost is replaced, up to 100 times with growing pauses, and the run
# resumes from its latest checkpoint. The other pods end when one is lost, so all restart together. An
# error of the run (1), a search engine that is down (69), a sign of collapse (70) and a spent budget
# (78) end the job; docs/resume.md lists the exit codes. Rules by exit code need Kubernetes 1.26.
# DRY_RUN=1 only prints the manifest.
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

# Prints a text as a YAML string, with escapes.
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
    refuse "ENVIRONMENT has '$name'; expected names of variables, such as \"SEARCH_URL TZ\"."
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
      # A restart would not help: an error, all episodes failed, collapse, a spent budget, Ctrl-C.
      - action: FailJob
        onExitCodes:
          containerName: jaxrl
          operator: In
          values: [1, 69, 70, 78, 130]
  template:
    spec:
      subdomain: $NAME
      restartPolicy: Never  # the job creates a new pod unless the rules above end it
      # On SIGTERM the run saves; after this time it is killed.
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
