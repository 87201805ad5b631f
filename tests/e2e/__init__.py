"""End-to-end tests: the real control plane, a real Prometheus, the real extender."""
