"""Tests with the real Karpenter, on a separate control plane."""
