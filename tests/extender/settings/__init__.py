"""Tests of `extender.settings`."""
