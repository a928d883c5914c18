#!/bin/bash
# What:     a Slurm batch job. One process on each node takes all of the node's GPUs; together they train as one job.
#           Processes that fail are started again, up to three times, from the last checkpoint. A node that fails ends the
#           job, which Slurm starts again because of --requeue.
# Command:  sbatch configs/cluster/slurm.sh configs/digits.yaml [KEY=VALUE ...]
#           sbatch configs/cluster/slurm.sh train.py [ARGUMENT ...]
# Change:   the #SBATCH lines: nodes, GPUs and cores of a node, time. Submit it in a folder that all nodes share, as
#           checkpoints go to runs/ there. If jdist is in a virtual environment, activate it before you submit.
#SBATCH --job-name=jdist
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -u
target=${1:?usage: sbatch configs/cluster/slurm.sh CONFIG [KEY=VALUE ...], or SCRIPT.py [ARGUMENT ...]}
shift
case $target in
  *.py) set -- python -u "$target" "$@" ;;
  *) set -- jdist run "$target" strategy.name=multi_worker "$@" ;;
esac
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take it over from the job by itself

# jdist reads the nodes, the number of tasks and this task's rank from the variables that srun sets.
for attempt in 0 1 2 3; do
  # A process that fails must not take the others with it at once: they say whom they lost, and end by themselves.
  srun --label --kill-on-bad-exit=0 --wait=120 "$@"
  code=$? # the highest of all tasks
  case $code in
    0) exit 0 ;;                                             # finished
    1 | 2) exit "$code" ;;                                   # training failed; what was asked for is not right
    130) exit "$code" ;;                                     # interrupted by hand
    143) scontrol requeue "$SLURM_JOB_ID" && exit "$code" ;; # out of time or preempted, and saved: go on later
  esac
  echo "jdist: attempt $attempt ended with exit code $code; it starts again from the last checkpoint" >&2
done
exit "$code"
