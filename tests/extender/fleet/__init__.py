"""Tests of `extender.fleet`."""
