"""Nodes, GPUs and switches, and the ranks placed on them."""
