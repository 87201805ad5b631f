"""Requests of a pod: GPUs, annotations, and the reason why it is not scheduled yet."""
