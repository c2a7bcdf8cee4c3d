#!/usr/bin/env bash
# Measures a node for the cost model: the kernels of one GPU, and collectives between its GPUs. With --nodes=2 it also measures
# collectives between nodes. A requeued job continues where it stopped.
# From the checkout: sbatch slurm/profile.sh      settings: slurm/README.md
#SBATCH --job-name=profile
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
PRESET=${PRESET:-7b_128k}
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

OUT=${OUT:-kernels_profile/gpu-$SLURM_JOB_ID.json}
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: a profile for $PRESET as $OUT; PROFILE=$OUT sbatch ... uses it"
find_ranks
exec srun --kill-on-bad-exit=1 "${RANKS[@]}" "$PYTHON" -m wlb.profile --device "${DEVICE:-cuda}" --preset "$PRESET" --out "$OUT" "${EXTRA[@]}"
