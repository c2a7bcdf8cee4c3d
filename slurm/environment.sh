# shellcheck shell=bash
# Sourced by launch.sh, doctor.sh, profile.sh, simulate.sh and fig12.sh, which set PRESET before, and gpu_hour.sh: enters the checkout that sbatch was called in
# and finds its Python. sbatch runs a copy of a script, so nothing can be found beside the script itself.
set -euo pipefail
cd "${WLB_HOME:-${SLURM_SUBMIT_DIR:?start this by sbatch}}"
if [[ ${PRESET:-} == *.toml ]]; then
    # A file is named from where sbatch was called, and containers see its folder.
    if [[ $PRESET != /* ]]; then PRESET=$SLURM_SUBMIT_DIR/$PRESET; fi
    [ -f "$PRESET" ] || { echo "$PRESET does not exist; give the path from the folder of sbatch"; exit 2; }
    folder=$(dirname "$PRESET")
    CONTAINER_MOUNTS=${CONTAINER_MOUNTS:+$CONTAINER_MOUNTS,}$folder:$folder
fi
if [ -n "${ENV_SCRIPT:-}" ]; then
    # Modules and conda read variables that are not set.
    set +u
    # shellcheck disable=SC1090
    source "$ENV_SCRIPT"
    set -u
fi
# CONTAINER has options of srun. The container's Python need not exist outside; the checkout is mounted at its own path.
CONTAINER=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    PYTHON=${WLB_PYTHON:-python}
    CONTAINER=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
        "--container-workdir=$PWD")
else
    PYTHON=${WLB_PYTHON:-.venv/bin/python}
    "$PYTHON" -c 'import wlb' || { echo "no wlb for $PYTHON: install it as README.md says, or set WLB_PYTHON"; exit 2; }
fi
# Cores for each task on the node that has fewest: SLURM_JOB_CPUS_PER_NODE is 96(x2),64 for nodes of 96, 96 and 64.
cpus_of_task() { echo $(($(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p) / SLURM_NTASKS_PER_NODE)); }
# Runs Python once, on the job's first node.
alone() { ${CONTAINER[0]:+srun --nodes=1 --ntasks=1} "${CONTAINER[@]}" "$PYTHON" "$@"; }
# Sets RANKS to options of srun for one task a GPU. Tasks fill a node's sockets in the order of its GPUs. Every task sees all GPUs of its node,
# because NVLink needs that.
find_ranks() {
    RANKS=(--label --distribution=block:block "--cpu-bind=${CPU_BIND:-cores}" "${CONTAINER[@]}" "${SRUN_ARGS[@]}" "--cpus-per-task=$(cpus_of_task)")
}
# Sets OUTPUT, unless it is set, to a file's run.output_dir, or to the default.
find_output() {
    if [ -z "${OUTPUT:-}" ] && [[ ${PRESET:-} == *.toml ]]; then
        local read_output='import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb")).get("run", {}).get("output_dir", ""))'
        OUTPUT=$(alone -c "$read_output" "$PRESET")
    fi
    OUTPUT=${OUTPUT:-runs}
}
# Settings of every run, after which come those of EXTRA.
GIVEN=("run.device=${DEVICE:-cuda}" ${PROFILE:+"cost.profile=$PROFILE"} ${STORE:+"data.store=$STORE" "data.heldout_store=${HELDOUT:-}"})
read -ra EXTRA <<<"${EXTRA:-}"
read -ra SRUN_ARGS <<<"${SRUN_ARGS:-}"
# sbatch --export=NAMES would make srun pass on these names alone, without what follows.
export SLURM_EXPORT_ENV=ALL
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 COLUMNS=${COLUMNS:-140}

# Gloo takes names of interfaces, NCCL prefixes of names unless "=" comes first.
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$INTERFACE}
fi
# CUDA_DEFAULTS of wlb/parallel/world.py has the same variables and their reasons.
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
