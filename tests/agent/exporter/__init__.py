"""Tests of the metrics and the HTTP server."""
