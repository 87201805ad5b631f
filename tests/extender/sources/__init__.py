"""Tests of the sources of nodes, pods and readings."""
