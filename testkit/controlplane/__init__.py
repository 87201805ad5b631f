"""A real control plane and Prometheus, and the scenarios' world on it."""
