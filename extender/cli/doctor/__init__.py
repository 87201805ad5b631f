"""The doctor: finds faults of an installation, and their remedies."""
