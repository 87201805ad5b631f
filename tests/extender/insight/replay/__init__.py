"""Tests of deciding again."""
