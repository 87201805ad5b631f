"""Tests of the log of decisions."""
