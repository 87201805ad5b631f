"""The main cases once more, on the oldest Kubernetes that docs/versions.md names."""
