"""Tests of extender.certs."""
