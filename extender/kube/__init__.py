"""The API server: client, kubeconfig, Lease, token review."""
