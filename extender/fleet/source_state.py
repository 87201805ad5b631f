"""What a source last said, in short."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceState:
    """What a source last said, for people.

    Attributes:
        at: when it last answered, seconds since the epoch.
        devices: how many devices it saw.
        unmatched_series: series whose labels named no node.
        unmatched_example: labels of one of them, "" where there is none.
        disagreements: devices of which its own signals say contradictory things.
    """

    at: float
    devices: int
    unmatched_series: int
    unmatched_example: str
    disagreements: int
