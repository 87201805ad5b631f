"""Tests of the benchmarks: of what they reckon, not of how fast anything is."""
