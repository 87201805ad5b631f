"""Fakes and worlds that tests, benchmarks and the simulation share."""
