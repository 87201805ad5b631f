"""Metrics and the JSON API for operators."""
