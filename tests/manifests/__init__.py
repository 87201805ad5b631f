"""Tests of what administrators apply: manifests/ and scheduler-config/."""
