"""Create and renew the certificates of the webhooks; run as a program."""
