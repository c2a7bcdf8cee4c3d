#!/usr/bin/env bash
# Trains your TOML file, or a preset: sbatch --nodes=N slurm/train.sh FILE [KEY=VALUE ...]
# Nodes times tasks per node must be the number of ranks. From the checkout: sbatch --nodes=2 slurm/train.sh configs/mine.toml
# Settings: slurm/README.md
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/launch.sh" "${1:?sbatch slurm/train.sh FILE.toml}" "${@:2}"
