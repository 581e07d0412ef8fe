"""Checkpoints and resume: manifests, retention, verification."""
