"""Fakes, builders and simulated clusters that tests, benchmarks and the demo share."""
