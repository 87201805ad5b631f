"""Tests with the real descheduler, on a separate control plane."""
