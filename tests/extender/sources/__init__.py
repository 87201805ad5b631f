"""Tests of what the extender learns from outside."""
