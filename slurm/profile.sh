#!/usr/bin/env bash
# Measures one GPU's kernels for the cost model; a requeued job goes on where it stopped.
# From the checkout: sbatch slurm/profile.sh      settings: slurm/README.md
#SBATCH --job-name=profile
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
PRESET=${PRESET:-7b_128k}
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

OUT=${OUT:-kernels_profile/gpu-$SLURM_JOB_ID.json}
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: a profile for $PRESET as $OUT"
exec ${CONTAINER[0]:+srun} "${CONTAINER[@]}" ${CONTAINER[0]:+"${SRUN_ARGS[@]}"} "$PYTHON" -m wlb.profile --device "${DEVICE:-cuda}" --preset "$PRESET" --out "$OUT" "${EXTRA[@]}"
