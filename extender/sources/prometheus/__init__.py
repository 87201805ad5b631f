"""Prometheus as a source: DCGM metrics, queried in a child process."""
