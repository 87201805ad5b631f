"""Both sides of the wire read the same recorded messages."""
