"""Makes and renews the certificates of webhooks: a CA of its own, the extender's, the asker's."""
