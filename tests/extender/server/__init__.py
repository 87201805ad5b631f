"""Tests of `extender.server`."""
