"""The admission webhook: set the scheduler of GPU pods when they are created."""
