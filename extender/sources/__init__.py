"""Sources of nodes, pods and readings: API server, Prometheus and node agents."""
