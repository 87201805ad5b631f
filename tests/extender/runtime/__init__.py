"""Tests of `extender.runtime`."""
