"""Placement decisions as pure functions over frozen values: no I/O, no clock, no log."""
