"""Ports, TLS, connection limits, request tracker, and the form of HTTP answers."""
