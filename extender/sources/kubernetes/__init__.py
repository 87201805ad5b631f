"""The API server as a source: nodes, pods, ResourceClaims."""
