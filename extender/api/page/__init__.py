"""The read-only page that shows the fleet in a browser."""
