"""Tests of the benchmarks' calculations; they do not measure speed."""
