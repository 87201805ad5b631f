"""The decision log: write decisions as JSON lines, and read them again."""
