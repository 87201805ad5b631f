"""The admission webhook: gives GPU pods their scheduler as they are created."""
