"""Simulated Prometheus with a subset of PromQL, for tests and the demo."""
