"""Answers for one pod: decides, assumes, remembers why."""
