"""Tests of `extender.kube.client`."""
