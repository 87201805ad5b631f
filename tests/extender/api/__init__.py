"""Tests of `extender.api`."""
