"""Decides again what a log of decisions tells, by the same code and other settings."""
