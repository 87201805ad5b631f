"""Replay a decision log offline under other settings."""
