"""Helpers of the process: logs, metrics, tasks, cooperative steps, decoding."""
