#!/usr/bin/env bash
# 550M parameters, 64K window, on 32 GPUs: TP 2 x CP 2 x PP 4 x DP 2 (Table 1). TP and CP stay inside a node.
# From the checkout: STORE=stores/mine sbatch slurm/550m_64k.sh      settings: slurm/README.md
#SBATCH --job-name=550m_64k
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
source "${WLB_HOME:-$SLURM_SUBMIT_DIR}/slurm/launch.sh" 550m_64k
