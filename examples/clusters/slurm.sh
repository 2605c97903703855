#!/bin/bash
#SBATCH --job-name=rlprims
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
# sbatch slurm.sh CONFIG.yaml [key=value ...]: one Ray cluster over the nodes of the job, and the trainer on the first.
set -eu

config=$1
shift
port=${RAY_PORT:-6379}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # the job's own
export OMP_NUM_THREADS=1

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port="$port" --block &
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address="$head:$port" --block &
fi
until ray health-check --address "$head:$port" 2> /dev/null; do sleep 2; done

trap 'kill -TERM "${run:-$!}"' TERM
# The run waits ray.start_timeout for the CPUs and GPUs of the other nodes.
srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    rlprims train "$config" execution=ray ray.address="$head:$port" ray.placement=PACK "$@" --resume-if-exists &
run=$!
code=0
wait "$run" || code=$?
if kill -0 "$run" 2> /dev/null; then # SIGTERM ended the first wait: the run saves
    code=0
    wait "$run" || code=$?
fi
exit "$code"
