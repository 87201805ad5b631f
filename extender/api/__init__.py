"""The HTTP API: its routes, who may read what, and metrics."""
