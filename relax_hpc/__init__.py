"""relax_hpc: asynchronous RL post-training of large models with nothing but Slurm underneath."""

__version__ = "0.1.0"
