"""Tests of pod groups that kube-scheduler places all or none, behind feature gates."""
