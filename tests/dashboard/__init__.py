"""Grafana's dashboard, defined in Python; each panel is one line of the JSON."""
