"""Merges what the sources say into the next snapshot."""
