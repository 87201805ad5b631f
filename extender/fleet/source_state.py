"""Summarize the last answer of a source."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """Summary of a source's last answer, for operators.

    Attributes:
        at: time of the answer, seconds since the epoch.
        devices: number of devices in it.
        unmatched_series: number of series whose labels name no node.
        unmatched_example: labels of one such series, "" without one.
        disagreements: number of devices whose signals contradict each other.
    """

    at: float
    devices: int
    unmatched_series: int
    unmatched_example: str
    disagreements: int
