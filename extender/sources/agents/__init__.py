"""What node agents report: who they are, what they say, and how it is handed on."""
