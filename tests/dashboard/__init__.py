"""Grafana's dashboard, described in Python; a panel is a line of the JSON."""
