# shellcheck shell=bash
# Sourced by launch.sh, profile.sh and simulate.sh: enters the checkout that sbatch was called in and
# finds its Python. sbatch runs a copy of a script, so nothing can be found beside the script itself.
set -euo pipefail
cd "${WLB_HOME:-${SLURM_SUBMIT_DIR:?start this by sbatch}}"
if [ -n "${ENV_SCRIPT:-}" ]; then
    set +u # modules and conda read variables that are not set
    # shellcheck disable=SC1090
    source "$ENV_SCRIPT"
    set -u
fi
PYTHON=${WLB_PYTHON:-.venv/bin/python}
"$PYTHON" -c 'import wlb' || { echo "no wlb for $PYTHON: install it as README.md says, or set WLB_PYTHON"; exit 2; }
read -ra EXTRA <<<"${EXTRA:-}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 COLUMNS=${COLUMNS:-140}
