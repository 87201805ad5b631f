"""Tests of who holds and uses a GPU."""
