"""Simulate a GPU fleet for the demo and the tests; every number is invented."""
