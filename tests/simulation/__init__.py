"""Tests of the simulated fleet that demo and end-to-end tests place pods on."""
