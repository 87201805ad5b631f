"""Keep the last report of each agent, and convert reports to readings."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.report.contract import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MAX_DEVICE_PROCESSES,
    MAX_NAME,
    MAX_PROCESSES,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Holders,
    Layout,
    LayoutDevice,
    Update,
)
from agent.report.contract import ForeignProcess as ReportedProcess
from extender.core.devices.expected_devices import resource_profile
from extender.core.devices.readings import (
    Column,
    DeviceInfo,
    DeviceKey,
    ForeignProcess,
    Own,
    Readings,
    Signal,
)
from extender.core.devices.readings import Holders as NodeHolders
from extender.core.devices.topology import Alignment, Place, alignment_by
from extender.core.nodes.snapshot import as_ratios
from extender.core.policy import Foreign
from extender.core.untyped import number_of
from extender.runtime.terminal_escapes import plain_text
from extender.sources.agents.refusal import AgentRefusal, RefusedError

SOURCE: Final = "agent"

_MAX_DEVICES: Final = 256
_MAX_ROWS: Final = 256
_MAX_SHARES: Final = 8192
"""Limit per node for holders, and for shares of memory: 64 pods on each of 128 devices."""

_MAX_VALUE: Final = 1e18
"""Larger values count as missing. No signal has them in its unit, and sums of smaller values stay
finite, so that no agent can turn a score into NaN."""

_MAX_LINKS: Final = 64
"""Limit for the NVLinks of a card; cards have 18 at most."""

_MAX_INDEX: Final = 1 << 16
_MAX_PID: Final = 1 << 31
_MAX_POD: Final = 317
"""Longest `namespace/name` of a pod."""

_MAX_AHEAD_SECONDS: Final = 86_400.0
"""Largest start time in the future; a process with a later start has no known start."""

_HOLDERS_LAG_SECONDS: Final = 5.0
"""Interval in which an agent queries the kubelet for the holders of devices."""

_ForeignProcesses = Mapping[DeviceKey, tuple[ForeignProcess, ...]]

_SIGNALS: Final = tuple(Signal)
_ROWS: Final = (
    *(signal.value for signal in _SIGNALS),
    *(AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE),
)
_ROW_INDEX: Final[Mapping[str, int]] = {name: row for row, name in enumerate(_ROWS)}
_DOUBLE: Final = 8


@dataclass(frozen=True, slots=True)
class _ValueFormat:
    """Format of the values in an agent's updates.

    Attributes:
        replicas: shares of each device that the kubelet offers, by MIG profile as in resource
            names.
        rows: number of rows in an update.
        source_rows: indexes of the rows that the extender uses.
        target_rows: indexes of these rows in the extender's matrix.
    """

    infos: tuple[DeviceInfo, ...]
    replicas: Mapping[str, int]
    rows: int
    source_rows: np.ndarray[tuple[int], np.dtype[np.intp]]
    target_rows: np.ndarray[tuple[int], np.dtype[np.intp]]


class AgentState:
    """Last report of one agent on one connection.

    Args:
        node: node of the agent's token.
    """

    __slots__ = ("_format", "_values", "at", "foreign", "is_news", "node", "pods", "shares", "uids")

    def __init__(self, node: str) -> None:
        self.node = node
        self.at = math.nan
        """Time of the report by the extender's clock, seconds since the epoch; NaN before it."""
        self.is_news = False
        self.pods: Mapping[DeviceKey, tuple[str, ...]] | None = None
        self.uids: Mapping[str, str] = {}
        self.shares: tuple[tuple[DeviceKey, str, int], ...] = ()
        """Memory that pods use on shared devices, from the last update: device, UID, bytes."""
        self.foreign: _ForeignProcesses = {}
        """Processes on devices with foreign use."""
        self._format: _ValueFormat | None = None
        self._values: Column = np.zeros((0, 0))

    @property
    def infos(self) -> tuple[DeviceInfo, ...]:
        """The agent's devices; the same object while they are unchanged."""
        return () if self._format is None else self._format.infos

    @property
    def replicas(self) -> Mapping[str, int]:
        """Number of shares per device that the kubelet offers, by MIG profile; {} if unknown."""
        return {} if self._format is None else self._format.replicas

    def apply(self, update: Update, received_at: float) -> None:
        """Apply an update.

        Args:
            received_at: time by the extender's clock, seconds since the epoch.

        Raises:
            RefusedError: it is from another node, or invalid.
        """
        if update.node != self.node:
            raise RefusedError(
                AgentRefusal.WRONG_NODE,
                f"the report is from node {update.node[:200]!r}, the token from {self.node!r}: "
                "set the agent's node to its pod's spec.nodeName",
            )
        value_format = (
            self._format if update.layout is None else _value_format_of(self.node, update.layout)
        )
        if value_format is None:
            raise _bad_report("the first update has no layout")
        count = len(value_format.infos)
        if len(update.values) != value_format.rows * count * _DOUBLE:
            raise _bad_report(
                f"update of {len(update.values)} bytes of values: must be {value_format.rows} rows "
                f"of {count} devices"
            )
        shares = _shares_of(value_format.infos, update)
        if update.foreign is not None:
            self.foreign = _foreign_of(value_format.infos, update.foreign, received_at)
        elif update.layout is not None:
            self.foreign = {}
        if update.holders is not None:
            self._apply_holders(value_format.infos, update.holders)
        elif update.layout is not None:
            self.pods, self.uids = None, {}
        self._format, self.shares = value_format, shares
        values = np.frombuffer(update.values, dtype="<f8").reshape(value_format.rows, count)
        self._values = np.where(np.abs(values) <= _MAX_VALUE, values, np.nan)
        lag = update.sent_at - update.at
        self.at = received_at - (min(lag, received_at) if lag > 0 else 0.0)  # lag may be NaN
        self.is_news |= update.is_news

    def _apply_holders(self, infos: tuple[DeviceInfo, ...], holders: Holders) -> None:
        if len(holders.pods) != len(infos):
            raise _bad_report(f"holders of {len(holders.pods)} devices: must be of {len(infos)}")
        count = sum(len(pods or ()) for pods in holders.pods)
        if count > _MAX_SHARES:
            raise _bad_report(f"{count} holders: must be at most {_MAX_SHARES}")
        if any(pods is None for pods in holders.pods):
            self.pods, self.uids = None, {}
            return
        self.pods = {
            info.key: tuple(_pod_key(namespace, name) for namespace, name, _ in pods)
            for info, pods in zip(infos, holders.pods, strict=True)
            if pods
        }
        self.uids = {
            _pod_key(namespace, name): uid
            for pods in holders.pods
            for namespace, name, uid in pods or ()
            if uid
        }

    def write_to(self, matrix: Column, start: int) -> None:
        """Write the measured values into the extender's matrix, from column `start` on."""
        value_format = self._format
        if value_format is not None:
            stop = start + len(value_format.infos)
            matrix[value_format.target_rows, start:stop] = self._values[value_format.source_rows]

    def holders(self) -> NodeHolders | None:
        """Return the pods that hold the devices, None if they are unknown."""
        if self.pods is None:
            return None
        return NodeHolders(at=self.at - _HOLDERS_LAG_SECONDS, pods=self.pods, uids=self.uids)


def _bad_report(text: str) -> RefusedError:
    return RefusedError(AgentRefusal.BAD_REPORT, text)


def _shares_of(
    infos: tuple[DeviceInfo, ...], update: Update
) -> tuple[tuple[DeviceKey, str, int], ...]:
    """Return the memory that pods use on shared devices.

    Raises:
        RefusedError: the shares are invalid.
    """
    shares = update.shares
    if len(shares) > _MAX_SHARES or any(
        not (0 <= index < len(infos) and 0 <= count <= _MAX_VALUE) for index, _, count in shares
    ):
        raise _bad_report(
            f"{len(shares)} shares of memory: must be at most {_MAX_SHARES}, on devices of the "
            f"layout, and from 0 to {_MAX_VALUE:g} bytes"
        )
    return tuple((infos[index].key, uid, count) for index, uid, count in shares)


def _foreign_of(
    infos: tuple[DeviceInfo, ...], processes: Sequence[ReportedProcess], now: float
) -> _ForeignProcesses:
    """Return the largest foreign processes of each device, with names that are safe to show.

    Raises:
        RefusedError: the processes are invalid.
    """
    if len(processes) > MAX_PROCESSES or any(
        not 0 <= one.device < len(infos)
        or not 0 < one.pid < _MAX_PID
        or (one.memory_bytes or 0) < 0
        for one in processes
    ):
        raise _bad_report(
            f"{len(processes)} foreign processes: must be at most {MAX_PROCESSES}, on devices of "
            "the layout, with a pid, and with memory that is not negative"
        )
    found: dict[DeviceKey, tuple[ForeignProcess, ...]] = {}
    for one in processes:
        started_at, key = one.started_at, infos[one.device].key
        is_sane = started_at is not None and 0 <= started_at <= now + _MAX_AHEAD_SECONDS
        process = ForeignProcess(
            pid=one.pid,
            name=plain_text(one.name, MAX_NAME),
            memory_bytes=None if (one.memory_bytes or 0) > _MAX_VALUE else one.memory_bytes,
            started_at=started_at if is_sane else None,
            pod=plain_text(one.pod, _MAX_POD),
            container=plain_text(one.container, MAX_NAME),
        )
        found[key] = (*found.get(key, ()), process)
    return {
        key: tuple(sorted(some, key=lambda one: -(one.memory_bytes or 0)))[:MAX_DEVICE_PROCESSES]
        for key, some in found.items()
    }


def _pod_key(namespace: str, name: str) -> str:
    return plain_text(f"{namespace}/{name}", _MAX_POD)


def _place_of(part: LayoutDevice, alignment: Alignment | None) -> Place | None:
    """Return the position of a device in its node, None if the agent does not know it."""
    if part.numa_node is None and not part.nvlink_peers:
        return None
    return Place(
        uuid="" if part.gpu_instance_id else part.uuid,
        numa_node=part.numa_node,
        nvlink_peers=part.nvlink_peers[:_MAX_LINKS],
        alignment=alignment,
    )


def _value_format_of(node: str, layout: Layout) -> _ValueFormat:
    """Return the format of an agent's values.

    Raises:
        RefusedError: the layout is invalid.
    """
    if len(layout.devices) > _MAX_DEVICES or len(layout.rows) > _MAX_ROWS:
        raise _bad_report(
            f"layout of {len(layout.devices)} devices and {len(layout.rows)} rows: must be at most "
            f"{_MAX_DEVICES} and {_MAX_ROWS}"
        )
    policy = layout.topology_policy
    alignment = alignment_by(policy, layout.topology_scope) if policy else None
    infos = tuple(
        DeviceInfo(
            node=node,
            uuid=part.uuid,
            gpu_instance_id=part.gpu_instance_id,
            index=None if part.index is None or not 0 <= part.index < _MAX_INDEX else part.index,
            model=plain_text(part.model, MAX_NAME),
            mig_profile=plain_text(part.mig_profile, MAX_NAME),
            driver_version=plain_text(layout.driver_version, MAX_NAME),
            place=_place_of(part, alignment),
        )
        for part in layout.devices
    )
    if len({info.key for info in infos}) != len(infos) or not all(map(_is_named, infos)):
        raise _bad_report("layout has a device twice, or a device without a valid UUID")
    source_rows = [at for at, name in enumerate(layout.rows) if name in _ROW_INDEX]
    return _ValueFormat(
        infos,
        {
            resource_profile(part.mig_profile): part.replicas
            for part in layout.devices
            if part.replicas is not None and part.replicas > 0
        },
        len(layout.rows),
        np.array(source_rows, dtype=np.intp),
        np.array([_ROW_INDEX[layout.rows[at]] for at in source_rows], dtype=np.intp),
    )


def _is_named(info: DeviceInfo) -> bool:
    """Return whether UUID and GPU instance id look like the driver's."""
    instance = info.gpu_instance_id
    is_card = 0 < len(info.uuid) <= MAX_NAME and info.uuid.isprintable()
    return is_card and (not instance or number_of(instance) is not None)


def readings_of(
    states: Sequence[AgentState], foreign: Foreign, now: float, devices: int = 0
) -> Readings:
    """Return the last reports of some agents as readings.

    Args:
        states: states of agents on different nodes.
        foreign: thresholds of foreign use.
        now: seconds since the epoch.
        devices: number of devices in all agents' reports.
    """
    starts = np.cumsum([0, *(len(state.infos) for state in states)])
    matrix = np.full((len(_ROWS), int(starts[-1])), np.nan)
    at = np.empty(int(starts[-1]))
    for state, start, stop in zip(states, starts[:-1], starts[1:], strict=True):
        state.write_to(matrix, start)
        at[start:stop] = state.at
    is_reported = ~np.isnan(matrix).all(axis=1)
    with np.errstate(invalid="ignore"):
        measured_at = at - np.maximum(matrix[_ROW_INDEX[AGE]], 0.0)
        is_foreign = (matrix[_ROW_INDEX[FOREIGN_MEMORY]] > foreign.memory_bytes) | (
            matrix[_ROW_INDEX[FOREIGN_UTILIZATION]] > foreign.utilization
        )
    return Readings(
        source=SOURCE,
        at=now,
        devices=tuple(info for state in states for info in state.infos),
        columns={signal: matrix[row] for row, signal in enumerate(_SIGNALS) if is_reported[row]},
        measured_at=measured_at,
        tenants=None,
        own=Own(
            nodes=tuple(state.node for state in states),
            news=frozenset(state.node for state in states if state.is_news),
            holders={state.node: state.holders() for state in states},
            mean=as_ratios(matrix[_ROW_INDEX[MEAN]]),
            mean_square=as_ratios(matrix[_ROW_INDEX[MEAN_SQUARE]]),
            is_foreign=is_foreign,
            foreign_bytes=np.maximum(matrix[_ROW_INDEX[FOREIGN_MEMORY]], 0.0),
            xid_age=matrix[_ROW_INDEX[XID_AGE]],
            devices=devices,
            replicas={state.node: found for state in states if (found := state.replicas)},
        ),
    )
