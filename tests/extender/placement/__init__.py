"""Tests of `extender.placement`."""
