"""Fetch device loads from the node's agent; NVML in a container has no loads of MIG devices."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from worker_device.visible import Load

REPORT_PATH: Final = "/v1/report"

_ACTIVITY: Final = ("graphics_active_ratio", "sm_active_ratio", "gpu_utilization_ratio")
_USED: Final = "memory_used_bytes"
_TOTAL: Final = "memory_total_bytes"
SIGNALS: Final = (*_ACTIVITY, _USED, _TOTAL)
"""Signals that this module reads from a report."""

_MAX_ANSWER_BYTES: Final = 1 << 20


class AgentError(Exception):
    """The agent did not answer, or its answer is not a report."""


def fetch_loads(url: str, deadline_seconds: float) -> dict[str, Load]:
    """Fetch the loads of the node's devices, by UUID of the card or MIG device.

    Args:
        url: URL of the agent's JSON report; `REPORT_PATH` is added if it has no path.
        deadline_seconds: timeout of each socket operation.

    Raises:
        AgentError: the agent did not answer, or its answer is not a report.
    """
    from urllib.request import Request, urlopen  # noqa: PLC0415 - takes 30 ms, rarely needed

    if not url.startswith(("http://", "https://")):
        raise AgentError(f"{url}: must start with http:// or https://")
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if host.count(":") > 1 and "[" not in host:  # $(HOST_IP) has no brackets, even with IPv6
        address, _, port = host.rpartition(":")
        host = f"[{address}]:{port}"
    url = f"{scheme}://{host}{'/' + path if path else REPORT_PATH}"
    try:
        with urlopen(  # noqa: S310 - the scheme is checked
            Request(url, headers={"Accept": "application/json"}),  # noqa: S310 - likewise
            timeout=deadline_seconds,
        ) as answer:
            content = answer.read(_MAX_ANSWER_BYTES)
    except (OSError, ValueError) as error:
        raise AgentError(f"{url}: {error}") from error
    try:
        return parse_loads(json.loads(content))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise AgentError(f"{url}: not an agent's report: {error}") from error


def parse_loads(report: Mapping[str, object]) -> dict[str, Load]:
    """Return the loads in a report, whose signals are columns with one row for each device."""
    devices, signals = report["devices"], report["signals"]
    if not isinstance(devices, list) or not isinstance(signals, dict):
        raise TypeError("devices must be a list, signals an object")
    loads: dict[str, Load] = {}
    for row, device in enumerate(devices):
        load = _load(signals, row)
        # `uuid` is the card's. MIG devices have their own UUIDs.
        names = device.get("mig_uuids") or [device["uuid"]]
        loads.update((str(name), load) for name in names)
    return loads


def _load(signals: Mapping[str, Sequence[float | None]], row: int) -> Load:
    busy = [
        value for name in _ACTIVITY if (value := signals.get(name, {row: None})[row]) is not None
    ]
    used, total = (signals.get(name, {row: None})[row] for name in (_USED, _TOTAL))
    return Load(
        utilization_ratio=max(busy) if busy else None,
        memory_used_ratio=used / total if used is not None and total else None,
    )
