"""Parts of tools/slurm_cluster: standard library only, so that it runs before installation."""
