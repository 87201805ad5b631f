"""Merge the data of all sources into the state of the fleet, and build snapshots of it."""
