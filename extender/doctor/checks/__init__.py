"""The checks, one module per subject: pure functions over `Facts`."""
