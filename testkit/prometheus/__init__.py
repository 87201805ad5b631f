"""A Prometheus that answers a subset of PromQL, for tests and the demo."""
