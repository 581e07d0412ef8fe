#!/bin/bash
# Rendered from recipes/tiny_dapo_sglang.toml by `relax-hpc render`; what follows the script's name goes
# to the supervisor: sbatch recipes/tiny_dapo_sglang.sh --set train.lr=2e-6
#SBATCH --job-name=tiny_dapo_sglang
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --time=60
# dcs; the supervisor runs on its first node
#SBATCH --partition=dcs
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH hetjob
# train
#SBATCH --partition=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH hetjob
# rollout
#SBATCH --partition=rollout
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ ! -e recipes/tiny_dapo_sglang.toml ]; then
    echo "no "recipes/tiny_dapo_sglang.toml" in $PWD: run sbatch in the project's folder" >&2
    exit 2
fi
PYTHON="${RELAX_PYTHON:-.venv/bin/python}"
command -v "$PYTHON" > /dev/null || PYTHON=python3
exec "$PYTHON" -m relax_hpc.cli supervise recipes/tiny_dapo_sglang.toml "$@"
