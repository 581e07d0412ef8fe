"""Plan, render, submit and supervise a run."""
