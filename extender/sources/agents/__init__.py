"""Node agents as a source: connections, tokens, and the delivery of reports."""
