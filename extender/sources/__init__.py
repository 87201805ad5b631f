"""What the extender learns from: the API server and Prometheus."""
