"""Fuzzing of every decoder: `make fuzz`."""
