"""The doctor: finds what is wrong with an installation, and the remedy."""
