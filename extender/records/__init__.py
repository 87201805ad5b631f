"""The decision log: write decisions and their inputs as JSON lines, and read them back."""
