# shellcheck shell=bash
# Sourced by the scripts of Table 1: `source launch.sh PRESET` trains on the nodes of this Slurm job.
# README.md beside it lists the settings, which are variables of sbatch's environment.
#
# srun starts the ranks itself, one task a GPU, with no torchrun between: Slurm's own signals then
# reach the ranks, which save and end; torchrun kills its workers 30 s after a signal and fails, and
# would want a rendezvous and a port. wlb reads its place among the ranks from Slurm.
set -euo pipefail
cd "${WLB_HOME:-$SLURM_SUBMIT_DIR}"
PRESET=$1 SYSTEM=${SYSTEM:-wlb} OUTPUT=${OUTPUT:-runs} MAX_RESTARTS=${MAX_RESTARTS:-50}
RUN_NAME=${RUN_NAME:-$PRESET-${SYSTEM/:/-}-$SLURM_JOB_ID} # a requeued job keeps its number
stop_file=$OUTPUT/.stop-$RUN_NAME
mkdir -p "$OUTPUT" && rm -f "$stop_file"

# USR1 comes to this shell alone (--signal=B:USR1@120), before the time limit and at pre-emption; TERM
# comes with scancel. Either way the ranks agree on a step after which they save and end.
ask() { echo "$(date -Is) $1: asking the ranks to save and end"; again=$2; touch "$stop_file"; }
again=no
trap 'ask "time limit or pre-emption" yes' USR1
trap 'ask "cancelled or out of time" no' TERM

source slurm/environment.sh
settings=("run.name=$RUN_NAME" "run.output_dir=$OUTPUT" "run.stop_file=$stop_file" "run.device=${DEVICE:-cuda}")
data="no STORE is given: a trial on Python's own sources, the corpus of the demo"
if [ -n "${STORE:-}" ]; then
    data="token store $STORE"
    settings+=("data.store=$STORE" "data.heldout_store=${HELDOUT:-}")
fi
echo "$(date -Is) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) at commit" \
    "$(git rev-parse --short HEAD 2>/dev/null || echo unknown): $PRESET, system $SYSTEM, on" \
    "$SLURM_JOB_NUM_NODES x $SLURM_NTASKS_PER_NODE ranks of $SLURM_JOB_NODELIST"
echo "run: $OUTPUT/$RUN_NAME; data: $data"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
srun --label --kill-on-bad-exit=1 --cpus-per-task=$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE)) \
    "$PYTHON" -m wlb train "$PRESET" --system "$SYSTEM" --resume auto --set "${settings[@]}" "${EXTRA[@]}" &
while kill -0 $! 2>/dev/null; do wait $! || true; done # a signal ends a wait, not srun
code=0 did=saved
wait $! || { code=$? did="pre-empted before it could save"; echo "$(date -Is) srun ended with $code"; }

# Slurm may tell only the ranks of a pre-emption, which ends those that still load; the job knows when.
if [[ $(scontrol show job -o "$SLURM_JOB_ID") == *" PreemptTime=2"* ]]; then again=yes; elif ((code)); then exit "$code"; fi
rm -f "$stop_file"
if [ $again = no ]; then echo "$(date -Is) ended"; exit; fi
if ((${SLURM_RESTART_COUNT:-0} >= MAX_RESTARTS)); then
    echo "$(date -Is) $did; not requeued after MAX_RESTARTS=$MAX_RESTARTS: RUN_NAME=$RUN_NAME sbatch ... goes on"
    exit 1
fi
echo "$(date -Is) $did; requeued"
exec scontrol requeue "$SLURM_JOB_ID"
