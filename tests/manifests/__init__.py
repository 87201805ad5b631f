"""Tests of files that administrators apply: manifests/ and scheduler-config/."""
