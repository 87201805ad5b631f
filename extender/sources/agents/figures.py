"""Figures of how node agents report, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFigures:
    """Counters and gauges of agent reports; counters start with the process.

    Attributes:
        connections: open connections.
        agents: agents whose reports are accepted.
        devices: devices in their reports.
        unknown_nodes: agents on nodes that the API server does not know (yet).
        reports: accepted reports.
        reviews: tokens that were sent to the API server for review.
        contested: readings that were rejected because another node reports the device.
        refused: refused or ended connections, by reason.
    """

    connections: int
    agents: int
    devices: int
    unknown_nodes: int
    reports: int
    reviews: int
    contested: int
    refused: Mapping[str, int]
