"""Tests of pushing reports."""
