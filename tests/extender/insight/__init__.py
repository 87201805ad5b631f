"""Tests of `extender.insight`."""
