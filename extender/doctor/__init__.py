"""The doctor: checks an installation, reports problems with evidence and a remedy."""
