#!/usr/bin/env bash
# Simulates a preset's job under all four systems on two CPU cores, and prints step times, memory and pipeline bubbles.
# From the checkout: PRESET=70b_128k sbatch slurm/simulate.sh      settings: slurm/README.md
#SBATCH --job-name=simulate
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
PRESET=${PRESET:-7b_128k}
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

lengths=(--synthetic wlb_paper)
if [ -n "${STORE:-}" ]; then lengths=(--corpus "$STORE"); fi
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $PRESET, lengths ${lengths[1]}"
read -ra systems <<<"${SYSTEM:-plain_4d fixed_4d paper wlb}"
exec ${CONTAINER[0]:+srun} "${CONTAINER[@]}" ${CONTAINER[0]:+"${SRUN_ARGS[@]}"} "$PYTHON" -m wlb simulate "$PRESET" "${lengths[@]}" --systems "${systems[@]}" ${PROFILE:+--set "cost.profile=$PROFILE"} "${EXTRA[@]}"
