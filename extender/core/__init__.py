"""The decision: pure values and functions, no I/O, no clock, no log."""
