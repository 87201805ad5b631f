"""Tests of the HTTP verbs that kube-scheduler calls."""
