"""Post-mortem of distributed jobs: which rank, which node, why, and what now."""
