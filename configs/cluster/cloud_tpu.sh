#!/bin/bash
# What:     runs a config on all hosts of a Cloud TPU slice (a TPU VM such as v5litepod-16). Each host asks Google's
#           metadata server for the slice's hosts and its own number, and tells jdist by JAX's three variables.
# Command:  configs/cluster/cloud_tpu.sh TPU_NAME ZONE configs/digits.yaml [KEY=VALUE ...]
#           configs/cluster/cloud_tpu.sh TPU_NAME ZONE train.py [ARGUMENT ...]
#           The same command goes on from the last checkpoint, after a maintenance or a preemption too.
# Change:   FOLDER, the folder with your configs on the TPU's hosts. Its runs/ must be on a file system that all hosts
#           share (Filestore, or a bucket mounted by gcsfuse): checkpoints go there. Install jdist with its extra tpu on all hosts first, from a copy of the repository:
#           gcloud compute tpus tpu-vm ssh TPU_NAME --zone ZONE --worker all --command "pip install 'PATH_TO_JDIST[tpu]'"
# Needs:    gcloud, logged in, with ssh to the hosts
set -euo pipefail
usage='usage: cloud_tpu.sh TPU_NAME ZONE CONFIG [KEY=VALUE ...], or TPU_NAME ZONE SCRIPT.py [ARGUMENT ...]'
name=${1:?$usage}
zone=${2:?$usage}
target=${3:?$usage}
shift 3
folder=${FOLDER:-/mnt/shared/jdist}

on_each_host=$(
  cat << 'HOST'
set -euo pipefail
ask() { curl -sSf -H 'Metadata-Flavor: Google' "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"; }
endpoints=$(ask worker-network-endpoints)
number=$(ask agent-worker-number)
# One host each, with commas between them: its name, or NAME:NUMBER:IP.
hosts=$(tr ',' '\n' <<< "$endpoints" | awk -F: '{ print (NF == 3) ? $3 : $1 }')
export JAX_COORDINATOR_ADDRESS="${hosts%%$'\n'*}:8482"
export JAX_NUM_PROCESSES="$(wc -l <<< "$hosts")"
export JAX_PROCESS_ID="$number"
export PATH="$HOME/.local/bin:$PATH"
HOST
)
case $target in
  *.py) run=$(printf '%q ' exec python3 -u "$target" "$@") ;;
  *) run=$(printf '%q ' exec jdist run "$target" strategy.name=multi_worker "$@") ;;
esac
gcloud compute tpus tpu-vm ssh "$name" --zone "$zone" --worker all \
  --command "$on_each_host"$'\n'"cd $(printf '%q' "$folder")"$'\n'"$run"
