"""Tests of idlegpu."""
