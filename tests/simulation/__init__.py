"""Tests of the simulated fleet that the demo and the end-to-end tests use."""
