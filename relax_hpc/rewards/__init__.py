"""Scores for completions; a failure is invalid with its reason, never a number."""
