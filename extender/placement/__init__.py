"""Place one pod: decide, assume it on the best node, record the reasons."""
