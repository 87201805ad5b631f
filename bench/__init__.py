"""Benchmarks of idlegpu and of its cost to a cluster. `make bench` runs them."""
