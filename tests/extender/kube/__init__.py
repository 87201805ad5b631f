"""Tests of `extender.kube.kube`."""
