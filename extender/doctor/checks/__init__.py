"""The checks, by what they look at: pure functions over `Facts`."""
