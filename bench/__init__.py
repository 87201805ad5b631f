"""Benchmarks: what idlegpu costs the cluster that it serves. `make bench` runs them."""
