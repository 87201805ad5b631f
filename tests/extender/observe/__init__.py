"""Tests of what people and programs see of the extender."""
