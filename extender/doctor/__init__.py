"""Says what is wrong with an installation, with the evidence and the remedy."""
