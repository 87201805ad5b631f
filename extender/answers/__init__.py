"""The JSON API's answers: one schema for server, client and documentation."""
