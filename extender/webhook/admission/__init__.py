"""The admission webhook: assigns a scheduler to GPU pods at creation."""
