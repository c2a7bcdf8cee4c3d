# shellcheck shell=bash
# Trains on the nodes of this Slurm job: `source launch.sh PRESET|FILE.toml [KEY=VALUE ...]`. The scripts of Table 1 and train.sh
# source it. README.md in this folder lists the settings, which are variables of sbatch's environment.
#
# srun starts the ranks, one task per GPU. torchrun is not used, so that Slurm's signals reach the ranks, which save and end.
# torchrun would kill its workers 30 s after a signal, and would need a port. wlb reads its rank from Slurm's variables.
set -euo pipefail
cd "${WLB_HOME:-$SLURM_SUBMIT_DIR}"
PRESET=$1 MAX_RESTARTS=${MAX_RESTARTS:-50} given=("${@:2}")
if [[ $PRESET == *.toml ]]; then
    SYSTEM=${SYSTEM:-} # A TOML file says itself how it packs.
else
    SYSTEM=${SYSTEM:-wlb} OUTPUT=${OUTPUT:-runs}
fi
if [ -n "${OUTPUT:-}" ]; then mkdir -p "$OUTPUT"; fi
name=$(basename "$PRESET" .toml)${SYSTEM:+-${SYSTEM/:/-}}-$SLURM_JOB_ID # A requeued job keeps its number.
RUN_NAME=${RUN_NAME:-${name//[^A-Za-z0-9._-]/_}}
if [[ ! $RUN_NAME =~ ^[A-Za-z0-9_][A-Za-z0-9._-]*$ ]]; then
    echo "RUN_NAME='$RUN_NAME' names a folder; use letters, digits, dots, dashes and underscores, the first no dot or dash"
    exit 2
fi

if [[ ! ${ON_FAILURE:=end} =~ ^(end|requeue)$ ]]; then
    echo "ON_FAILURE='$ON_FAILURE' says what follows a failed run; use end or requeue"
    exit 2
fi

# Only this shell gets USR1 (--signal=B:USR1@120), before the time limit and at preemption. scancel sends TERM. In both cases
# the ranks agree on a step after which they save and end.
stop_file='' asked=no again=no
ask() { echo "$(date -Is) $1: asking the ranks to save and end"; again=$2 asked=yes; [ -z "$stop_file" ] || touch "$stop_file"; }
trap 'ask "time limit or preemption" yes' USR1
trap 'ask "cancelled or out of time" no' TERM

source slurm/environment.sh
find_output
# Each job has its own stop file, because a second job with the same run may wait for the first one to end. A requeued job keeps
# its number.
mkdir -p "$OUTPUT" && rm -f "$OUTPUT/.stop-$RUN_NAME@$SLURM_JOB_ID"
stop_file=$OUTPUT/.stop-$RUN_NAME@$SLURM_JOB_ID
if [ $asked = yes ]; then touch "$stop_file"; fi # A signal came before the path was known.
settings=("run.name=$RUN_NAME" "run.output_dir=$OUTPUT" "run.stop_file=$stop_file" "${GIVEN[@]}") trial=''
if [ -n "${STORE:-}" ]; then
    data="token store $STORE"
elif [[ $PRESET == *.toml ]]; then
    data="as $PRESET says"
elif [[ " ${EXTRA[*]} ${given[*]}" =~ \ data\.(store|blend|corpus)= ]]; then
    data="as ${BASH_REMATCH[0]# }... says"
else
    trial="STORE=PREFIX sbatch ... trains on your documents (wlb prepare), or on lengths like the paper's (wlb prepare --synthetic wlb_paper)"
    data="no STORE is given: a trial of 100 steps on Python's own sources, whose documents are short; $trial"
    settings+=(training.steps=100 training.warmup_steps=10)
fi
whose=''
if [ "$SYSTEM" = wlb ]; then whose=" (this project's own; SYSTEM=paper is the paper's WLB-LLM)"; fi
echo "$(date -Is) job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) at commit" \
    "$(git rev-parse --short HEAD 2>/dev/null || echo unknown): $PRESET${SYSTEM:+, system $SYSTEM$whose}, on" \
    "$SLURM_JOB_NUM_NODES x $SLURM_NTASKS_PER_NODE ranks of $SLURM_JOB_NODELIST"
echo "run: $OUTPUT/$RUN_NAME; data: $data"

# on_ranks KILL COMMAND OPTIONS runs `wlb COMMAND` on all ranks, and sets `code` to srun's exit status. With KILL=1 the first rank
# that fails ends the others.
find_ranks
on_ranks() {
    srun --kill-on-bad-exit="$1" "${RANKS[@]}" "$PYTHON" -m wlb "$2" "$PRESET" --system "$SYSTEM" "${@:3}" \
        --set "${settings[@]}" "${EXTRA[@]}" "${given[@]}" &
    while kill -0 $! 2>/dev/null; do wait $! || true; done # A signal ends `wait`, but not srun.
    code=0
    wait $! || { code=$?; echo "$(date -Is) $2: srun ended with $code"; }
}
# Prints which rank failed first and where each rank was, from files that the ranks left. Exit status 2 means a wrong command,
# with which no rank started.
explain() { ((code == 0 || code == 2)) || alone -m wlb report --failure "$OUTPUT/$RUN_NAME" || true; }
newest() { find "$OUTPUT/$RUN_NAME/checkpoints" -maxdepth 1 -regex '.*/step-[0-9]+' -printf '%f\n' 2>/dev/null | sort | tail -n 1; }
code=0 did=saved before=$(newest || true)
if [ "${DOCTOR:-quick}" != no ]; then on_ranks 0 doctor --quick; fi
if ((code == 3)); then echo "the nodes are not fit to train; DOCTOR=no sbatch ... does without this examination"; fi
((code)) || { on_ranks 1 train --resume auto && explain; }
((code == 0)) || did="preempted before it could save"

# Slurm's record of the job says whether it was preempted. Its signals do not: they may reach only the ranks, and they kill ranks
# that still load.
if [[ $(scontrol show job -o "$SLURM_JOB_ID") == *" PreemptTime=2"* ]]; then
    again=yes
elif ((code)); then
    # Requeue only if this start saved a checkpoint. Then each start makes progress, and a job that always fails is not requeued
    # forever. Exit status 2 means a wrong command.
    after=$(newest || true)
    if [ "$ON_FAILURE" = end ] || [ $asked$again = yesno ] || ((code == 2)) || [[ ! $after > $before ]]; then exit "$code"; fi
    again=yes did="failed after it had saved $after"
fi
rm -f "$stop_file"
if [ $again = no ]; then
    [ -z "$trial" ] || echo "this was a trial; $trial"
    echo "$(date -Is) ended"
    exit
fi
if ((${SLURM_RESTART_COUNT:-0} >= MAX_RESTARTS)); then
    echo "$(date -Is) $did; not requeued after MAX_RESTARTS=$MAX_RESTARTS: RUN_NAME=$RUN_NAME sbatch ... goes on"
    exit 1
fi
echo "$(date -Is) $did; requeued"
exec scontrol requeue "$SLURM_JOB_ID"
