"""Tests of reading GPUs."""
