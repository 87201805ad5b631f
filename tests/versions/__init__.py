"""The main cases once more, on the oldest Kubernetes that README.md names."""
