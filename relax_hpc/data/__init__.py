"""Prompts, tokenizers and packing."""
