#!/bin/bash
# One process for each GPU of two nodes, on a disk that both nodes see:
#
#     sbatch experiments/cluster/slurm.sh --preset gpt3-1.3b --data my_texts/ --mesh fsdp=16 --run runs/mine
#
# srun tells each process who it is; jaxgpt finds the rest. Two minutes before the time is over Slurm sends USR1 to all
# processes, and each run is saved. A second signal to a process, such as the TERM when the time is over, ends it at once:
# where steps or saves take longer, warn earlier. A run that was stopped, or that has lost a node, is queued again, and
# goes on from its last checkpoint.
#
#SBATCH --job-name=jaxgpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=jaxgpt-%j.out

set -euo pipefail

# Nodes may take minutes until all of them run.
export JAXGPT_JOIN_SECONDS=600
# Stored tokens and compiled programs are made by process 0 and read by all.
export JAXGPT_CACHE="${JAXGPT_CACHE:-$PWD/.cache/jaxgpt}"

status=0
srun --kill-on-bad-exit=0 jaxgpt train "$@" || status=$?

case "$status" in
    # 75: the run was stopped and is saved, or a process is gone.
    75) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
