"""Tests of the extender's writes: events, wakes, messages to other replicas."""
