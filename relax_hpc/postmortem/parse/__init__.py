"""Parsers: one family of messages per module, each a small function on records."""
