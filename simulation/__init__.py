"""A simulated GPU fleet: what the demo and the tests place pods on. Every number is invented."""
