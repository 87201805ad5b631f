"""Repeat the decisions of a decision log with the extender's own code and other settings."""
