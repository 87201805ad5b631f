"""Metrics of the agent under its own and dcgm-exporter's names, and the HTTP server for them."""
