"""End-to-end tests with a real control plane, a real Prometheus and the real extender."""
