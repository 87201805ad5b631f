"""Pushes the report to every replica of the extender."""
