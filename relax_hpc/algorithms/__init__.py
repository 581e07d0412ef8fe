"""Advantages, losses, corrections and overlong shaping: pure functions of tensors."""
