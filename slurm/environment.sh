# shellcheck shell=bash
# Enters the checkout from which sbatch was called, finds its Python, and sets variables and functions for the other scripts.
# They source this file: launch.sh, doctor.sh, profile.sh, simulate.sh and fig12.sh, which set PRESET before, and gpu_hour.sh.
# sbatch runs a copy of a script in another folder, so the checkout cannot be found from the path of the script.
set -euo pipefail
cd "${WLB_HOME:-${SLURM_SUBMIT_DIR:?start this by sbatch}}"
if [[ ${PRESET:-} == *.toml ]]; then
    # The path of a TOML file is relative to the folder of sbatch. Containers must mount the file's folder.
    if [[ $PRESET != /* ]]; then PRESET=$SLURM_SUBMIT_DIR/$PRESET; fi
    [ -f "$PRESET" ] || { echo "$PRESET does not exist; give the path from the folder of sbatch"; exit 2; }
    folder=$(dirname "$PRESET")
    CONTAINER_MOUNTS=${CONTAINER_MOUNTS:+$CONTAINER_MOUNTS,}$folder:$folder
fi
if [ -n "${ENV_SCRIPT:-}" ]; then
    # Scripts of modules and conda use unset variables, which `set -u` would refuse.
    set +u
    # shellcheck disable=SC1090
    source "$ENV_SCRIPT"
    set -u
fi
# CONTAINER has the options of srun for a container. The container's Python need not exist outside of it. The checkout is
# mounted at the same path.
CONTAINER=()
if [ -n "${CONTAINER_IMAGE:-}" ]; then
    PYTHON=${WLB_PYTHON:-python}
    CONTAINER=("--container-image=$CONTAINER_IMAGE" "--container-mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
        "--container-workdir=$PWD")
else
    PYTHON=${WLB_PYTHON:-.venv/bin/python}
    "$PYTHON" -c 'import wlb' || { echo "no wlb for $PYTHON: install it as README.md says, or set WLB_PYTHON"; exit 2; }
fi
# Prints the number of cores per task, for the node with the fewest cores. SLURM_JOB_CPUS_PER_NODE is "96(x2),64" for nodes of
# 96, 96 and 64 cores.
cpus_of_task() { echo $(($(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p) / SLURM_NTASKS_PER_NODE)); }
# Runs Python once, on the job's first node.
alone() { ${CONTAINER[0]:+srun --nodes=1 --ntasks=1} "${CONTAINER[@]}" "$PYTHON" "$@"; }
# Sets RANKS to the options of srun for one task per GPU. Tasks fill a node's sockets in the order of its GPUs. Every task sees
# all GPUs of its node, because NVLink needs that.
find_ranks() {
    RANKS=(--label --distribution=block:block "--cpu-bind=${CPU_BIND:-cores}" "${CONTAINER[@]}" "${SRUN_ARGS[@]}" "--cpus-per-task=$(cpus_of_task)")
}
# Sets OUTPUT, if it is not set, to run.output_dir of a TOML file, or to the default.
find_output() {
    if [ -z "${OUTPUT:-}" ] && [[ ${PRESET:-} == *.toml ]]; then
        local read_output='import sys, tomllib; print(tomllib.load(open(sys.argv[1], "rb")).get("run", {}).get("output_dir", ""))'
        OUTPUT=$(alone -c "$read_output" "$PRESET")
    fi
    OUTPUT=${OUTPUT:-runs}
}
# Settings of every run. Settings in EXTRA come behind them and override them.
GIVEN=("run.device=${DEVICE:-cuda}" ${PROFILE:+"cost.profile=$PROFILE"} ${STORE:+"data.store=$STORE" "data.heldout_store=${HELDOUT:-}"})
read -ra EXTRA <<<"${EXTRA:-}"
read -ra SRUN_ARGS <<<"${SRUN_ARGS:-}"
# With sbatch --export=NAMES srun would pass only these variables to the ranks, and none of those that are set below.
export SLURM_EXPORT_ENV=ALL
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 COLUMNS=${COLUMNS:-140}

# Gloo takes exact names of interfaces. NCCL takes prefixes of names, or exact names after "=".
if [ -n "${INTERFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$INTERFACE} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=$INTERFACE}
fi
# CUDA_DEFAULTS in wlb/parallel/world.py sets the same variables and gives the reasons.
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} NCCL_DEBUG=${NCCL_DEBUG:-WARN}
