"""Devices: readings, expected devices, windows of use, models."""
