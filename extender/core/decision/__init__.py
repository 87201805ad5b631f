"""The decision: signals, health, landing set, filtering, scoring, explanation."""
