#!/bin/bash
# Rendered from recipes/sweep.toml by `relax-hpc render`; what follows the script's name goes
# to the supervisor: sbatch recipes/sweep.sh --set train.lr=2e-6
#SBATCH --job-name=sweep
#SBATCH --array=0-7
#SBATCH --output=%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120
#SBATCH --requeue
#SBATCH --time=60
# dcs, train, rollout; the supervisor runs on its first node
#SBATCH --partition=all
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4

cd "${SLURM_SUBMIT_DIR:-.}" || exit 2
if [ ! -e recipes/sweep.toml ]; then
    echo "no "recipes/sweep.toml" in $PWD: run sbatch in the project's folder" >&2
    exit 2
fi
PYTHON="${RELAX_PYTHON:-.venv/bin/python}"
command -v "$PYTHON" > /dev/null || PYTHON=python3
exec "$PYTHON" -m relax_hpc.cli supervise recipes/sweep.toml "$@"
