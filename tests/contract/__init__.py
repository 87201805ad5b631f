"""Recorded messages that both sides of a protocol must read."""
