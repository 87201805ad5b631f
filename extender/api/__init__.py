"""The HTTP API: routes, access control and metrics."""
