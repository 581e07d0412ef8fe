"""Engines and the loop that keeps them busy."""
