"""What the extender writes to the API server."""
