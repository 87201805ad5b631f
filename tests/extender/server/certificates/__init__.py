"""Tests of extender.server.certificates."""
