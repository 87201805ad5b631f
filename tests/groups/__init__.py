"""Pod groups, which kube-scheduler places whole or not at all: behind gates of their own."""
