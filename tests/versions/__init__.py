"""The main cases on the oldest Kubernetes in docs/versions.md."""
