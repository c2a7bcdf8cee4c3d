#!/usr/bin/env bash
# Measures on this node what the project claims about GPUs. A requeued job continues where it stopped.
# From the checkout: sbatch slurm/gpu_hour.sh      settings: slurm/README.md
#SBATCH --job-name=gpu_hour
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=01:15:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

OUT=${OUT:-runs/gpu_hour-$SLURM_JOB_ID}
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: an hour of measurements in $OUT"
exec ${CONTAINER[0]:+srun} "${CONTAINER[@]}" ${CONTAINER[0]:+"${SRUN_ARGS[@]}"} "$PYTHON" -m experiments.gpu_hour --out "$OUT" "${EXTRA[@]}"
