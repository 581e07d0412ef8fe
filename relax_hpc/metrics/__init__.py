"""Metrics with their reduction, writers and spans."""
