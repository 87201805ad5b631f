"""Tests of the GPU choice for worker processes."""
