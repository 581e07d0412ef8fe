"""Read a run folder back: status, curves."""
