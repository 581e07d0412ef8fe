"""Parsers: one small function per message family; each turns lines into events."""
