"""Tests of `extender.kube`."""
