#!/bin/bash
# Rendered from recipes/qwen3_235b_a22b.toml by `relax-hpc render`; what follows the script's name goes
# to the supervisor: sbatch recipes/qwen3_235b_a22b.sh --set train.lr=2e-6
#SBATCH --job-name=qwen3_235b_a22b
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@300
#SBATCH --requeue
#SBATCH --time=1440
# dcs, train; the supervisor runs on its first node
#SBATCH --partition=train
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=66
#SBATCH --gres=gpu:h800:8
#SBATCH --exclusive
#SBATCH hetjob
# rollout
#SBATCH --partition=rollout
#SBATCH --nodes=64
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=65
#SBATCH --gres=gpu:h800:8
#SBATCH --exclusive

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ ! -e recipes/qwen3_235b_a22b.toml ]; then
    echo "no "recipes/qwen3_235b_a22b.toml" in $PWD: run sbatch in the project's folder" >&2
    exit 2
fi
PYTHON="${RELAX_PYTHON:-.venv/bin/python}"
command -v "$PYTHON" > /dev/null || PYTHON=python3
exec "$PYTHON" -m relax_hpc.cli supervise recipes/qwen3_235b_a22b.toml "$@"
