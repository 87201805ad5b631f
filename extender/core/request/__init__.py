"""What a pod requests: GPUs, annotations, and why it is not scheduled yet."""
