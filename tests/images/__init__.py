"""Tests of the images' contents, without Docker."""
