#!/usr/bin/env bash
# Examines the nodes of a preset's job with `wlb doctor`. Takes about two minutes; run it before a long job.
# From the checkout: PRESET=7b_128k sbatch --nodes=8 slurm/doctor.sh      settings: slurm/README.md
#SBATCH --job-name=doctor
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=00:20:00
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
PRESET=${PRESET:-7b_128k}
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

find_output
OUT=${OUT:-doctor-$SLURM_JOB_ID.json}
if [[ $PRESET != *.toml ]]; then SYSTEM=${SYSTEM:-wlb}; fi # A TOML file says itself how it packs.
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: examined for $PRESET${SYSTEM:+, system $SYSTEM}, as $OUT"
find_ranks
# Do not kill the other ranks when one fails, because srun would then return the status of a signal. The examination itself
# names a rank that hangs, and ends all ranks.
exec srun --kill-on-bad-exit=0 "${RANKS[@]}" "$PYTHON" -m wlb doctor "$PRESET" --system "${SYSTEM:-}" --json "$OUT" \
    --set "run.output_dir=$OUTPUT" "${GIVEN[@]}" "${EXTRA[@]}"
