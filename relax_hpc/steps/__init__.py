"""What srun starts: one module per role, wiring only."""
