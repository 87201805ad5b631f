"""Tests of what the extender does outside."""
