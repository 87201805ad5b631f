"""Tests of what the images are made of, without a Docker."""
