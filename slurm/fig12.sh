#!/usr/bin/env bash
# Measures one group of bars in Figure 12. Trains a preset for a few dozen steps with Plain-4D, Fixed-4D, the paper's WLB-LLM and
# wlb, one after the other on the same nodes and documents, whose lengths are like the paper's. Prints speed-ups over Plain-4D.
# From the checkout: PRESET=7b_128k sbatch --nodes=8 slurm/fig12.sh      settings: slurm/README.md
#SBATCH --job-name=fig12
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:30:00
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
PRESET=${PRESET:-7b_128k} STEPS=${STEPS:-40}
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/environment.sh"

find_output
find_ranks
folder=$OUTPUT/fig12-$SLURM_JOB_ID
if [ -z "${STORE:-}" ]; then
    STORE=$folder/documents
    GIVEN+=("data.store=$STORE" model.vocab_size=32000)
    alone -m experiments.paper.fig12.measured documents "$PRESET" --steps "$STEPS" --out "$STORE" --set "${EXTRA[@]}"
fi
settings=("${GIVEN[@]}" "training.steps=$STEPS" eval.steps=0 checkpoint.interval=0 checkpoint.keep=1 "run.output_dir=$folder" "${EXTRA[@]}")
read -ra systems <<<"${SYSTEM:-plain_4d fixed_4d paper wlb}"
echo "$(date -Is) job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: $PRESET, $STEPS steps each of ${systems[*]}, on $STORE, in $folder"
# on_ranks COMMAND SYSTEM OPTIONS runs `wlb COMMAND` with this system on all ranks.
on_ranks() { srun --kill-on-bad-exit=1 "${RANKS[@]}" "$PYTHON" -m wlb "$1" "$PRESET" --system "$2" "${@:3}" --set "${settings[@]}" "run.name=${2/:/-}"; }
if [ "${DOCTOR:-quick}" != no ]; then on_ranks doctor "${systems[0]}" --quick; fi
folders=()
for system in "${systems[@]}"; do
    echo "$(date -Is) $system"
    folders+=("$folder/${system/:/-}")
    on_ranks train "$system"
    rm -rf "${folders[-1]}/checkpoints" # A checkpoint is as large as model and optimiser, and only times are needed.
done
alone -m experiments.paper.fig12.measured row "$PRESET" "${folders[@]}"
