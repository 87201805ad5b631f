"""Create and renew the webhooks' TLS certificates: a private CA, extender, kube-scheduler."""
