#!/usr/bin/env bash
# 30B parameters, 64K window, on 64 GPUs: TP 8 x CP 2 x PP 4 x DP 1 (Table 1). TP stays inside a node.
# From the checkout: STORE=stores/mine sbatch slurm/30b_64k.sh      settings: slurm/README.md
#SBATCH --job-name=30b_64k
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/launch.sh" 30b_64k
