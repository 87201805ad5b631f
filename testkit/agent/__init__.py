"""Fakes of what the node agent reads and talks to."""
