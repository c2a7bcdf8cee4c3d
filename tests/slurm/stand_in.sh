#!/usr/bin/env bash
# Stands for Python in tests of slurm/launch.sh: like `wlb train` it works until the stop file or
# SIGTERM tells it to end; started again, it is done at once.
if [ "$1" = -c ]; then # the launcher asks whether wlb is installed
    touch "$OUTPUT/asked-$RUN_NAME"
    exec sleep "${ASKED_S:-0}"
fi
if [ "$3" = doctor ]; then # it finds nothing, or what a test plants
    echo "examined: $*"
    exit "${DOCTOR_CODE:-0}"
fi
if [ "$3" = report ]; then # what ended the ranks
    echo "reported: $*"
    exit
fi
for word in "$@"; do
    if [[ $word == run.stop_file=* ]]; then file=${word#*=}; fi
done
trap 'echo "SIGTERM"; exit 0' TERM
echo "began: $*"
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then exit; fi
until [ -e "${file:?}" ]; do sleep 0.1; done
echo "saw the stop file"
