"""What each agent last said, and the readings that this makes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.report import (
    AGE,
    FOREIGN_MEMORY,
    FOREIGN_UTILIZATION,
    MEAN,
    MEAN_SQUARE,
    XID_AGE,
    Holders,
    Layout,
    Update,
)
from extender.core.columns import within
from extender.core.devices.expected_devices import resource_profile
from extender.core.devices.readings import (
    Column,
    DeviceInfo,
    DeviceKey,
    Own,
    Readings,
    Signal,
)
from extender.core.devices.readings import Holders as NodeHolders
from extender.core.policy import Foreign
from extender.sources.agents.refusal import AgentRefusal, RefusedError

SOURCE: Final = "agent"

MOST_DEVICES: Final = 256
MOST_ROWS: Final = 256
MOST_SHARES: Final = 8192
"""On a node: 64 pods on each of 128 devices."""

MOST_VALUE: Final = 1e18
"""No unit of a signal makes a larger number. Sums of such values stay finite, so that no agent can
make a score that is no number."""

HOLDERS_LAG_SECONDS: Final = 5.0
"""The agent asks the kubelet so often who holds what."""

_SIGNALS: Final = tuple(Signal)
_ROWS: Final = (
    *(signal.value for signal in _SIGNALS),
    *(AGE, XID_AGE, FOREIGN_MEMORY, FOREIGN_UTILIZATION, MEAN, MEAN_SQUARE),
)
_ROW_OF: Final[Mapping[str, int]] = {name: row for row, name in enumerate(_ROWS)}
_DOUBLE: Final = 8


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the numbers of an agent's updates stand for.

    Attributes:
        infos: the devices.
        replicas: shares that the kubelet offers of each, by MIG profile as resources write it.
        rows: how many rows there are.
        known: those of them that mean something to us.
        into: their rows among ours.
    """

    infos: tuple[DeviceInfo, ...]
    replicas: Mapping[str, int]
    rows: int
    known: np.ndarray[tuple[int], np.dtype[np.intp]]
    into: np.ndarray[tuple[int], np.dtype[np.intp]]


class AgentState:
    """What one agent said last, on one connection.

    Args:
        node: the node of its token.
    """

    __slots__ = (
        "_shape",
        "_values",
        "at",
        "is_news",
        "node",
        "pods",
        "shares",
        "uids",
    )

    def __init__(self, node: str) -> None:
        self.node = node
        self.at = math.nan
        """When its report was made, by our clock."""
        self.is_news = False
        self.pods: Mapping[DeviceKey, tuple[str, ...]] | None = None
        self.uids: Mapping[str, str] = {}
        self.shares: tuple[tuple[DeviceKey, str, int], ...] = ()
        """What the last update said of who holds how much memory of shared devices."""
        self._shape: _Shape | None = None
        self._values: Column = np.zeros((0, 0))

    @property
    def infos(self) -> tuple[DeviceInfo, ...]:
        """Its devices; the same object as long as they are the same."""
        return () if self._shape is None else self._shape.infos

    @property
    def replicas(self) -> Mapping[str, int]:
        """Shares that the kubelet offers of each device, by MIG profile, as far as it tells."""
        return {} if self._shape is None else self._shape.replicas

    def take(self, update: Update, received_at: float) -> None:
        """Take an update over.

        Args:
            update: what was said.
            received_at: when, seconds since the epoch by our clock.

        Raises:
            RefusedError: it is of another node, or cannot be.
        """
        if update.node != self.node:
            raise RefusedError(
                AgentRefusal.WRONG_NODE,
                f"the report is of node {update.node[:200]!r}, the token of {self.node!r}: "
                "set the agent's node to its pod's spec.nodeName",
            )
        shape = self._shape if update.layout is None else _shape_of(self.node, update.layout)
        if shape is None:
            raise RefusedError(AgentRefusal.BAD_REPORT, "the first update says no layout")
        count = len(shape.infos)
        if len(update.values) != shape.rows * count * _DOUBLE:
            raise RefusedError(
                AgentRefusal.BAD_REPORT,
                f"update of {len(update.values)} bytes of values: must be {shape.rows} rows of "
                f"{count} devices",
            )
        shares = _shares_of(shape.infos, update)
        if update.holders is not None:
            self._take_holders(shape.infos, update.holders)
        elif update.layout is not None:
            self.pods, self.uids = None, {}
        self._shape, self.shares = shape, shares
        values = np.frombuffer(update.values, dtype="<f8").reshape(shape.rows, count)
        self._values = np.where(np.abs(values) <= MOST_VALUE, values, np.nan)
        lag = update.sent_at - update.at
        self.at = received_at - (min(lag, received_at) if lag > 0 else 0.0)  # it may be NaN
        self.is_news |= update.is_news

    def _take_holders(self, infos: tuple[DeviceInfo, ...], holders: Holders) -> None:
        if len(holders.pods) != len(infos):
            raise RefusedError(
                AgentRefusal.BAD_REPORT,
                f"holders of {len(holders.pods)} devices: must be of {len(infos)}",
            )
        if any(pods is None for pods in holders.pods):
            self.pods, self.uids = None, {}
            return
        self.pods = {
            info.key: tuple(f"{namespace}/{name}" for namespace, name, _ in pods)
            for info, pods in zip(infos, holders.pods, strict=True)
            if pods
        }
        self.uids = {
            f"{namespace}/{name}": uid
            for pods in holders.pods
            for namespace, name, uid in pods or ()
            if uid
        }

    def fill(self, matrix: Column, start: int) -> None:
        """Write what was measured into columns of a matrix, its rows as ours."""
        shape = self._shape
        if shape is not None:
            stop = start + len(shape.infos)
            matrix[shape.into, start:stop] = self._values[shape.known]

    def holders(self) -> NodeHolders | None:
        """Return who holds its devices, None where that is not known."""
        if self.pods is None:
            return None
        return NodeHolders(at=self.at - HOLDERS_LAG_SECONDS, pods=self.pods, uids=self.uids)


def _shares_of(
    infos: tuple[DeviceInfo, ...], update: Update
) -> tuple[tuple[DeviceKey, str, int], ...]:
    """Return who holds how much memory of shared devices.

    Raises:
        RefusedError: that cannot be.
    """
    told = update.shares
    if len(told) > MOST_SHARES or any(
        not 0 <= place < len(infos) or count < 0 for place, _, count in told
    ):
        raise RefusedError(
            AgentRefusal.BAD_REPORT,
            f"{len(told)} shares of memory: must be at most {MOST_SHARES}, of the devices of the "
            "layout, and none negative",
        )
    return tuple((infos[place].key, uid, count) for place, uid, count in told)


def _shape_of(node: str, layout: Layout) -> _Shape:
    """Return what an agent's numbers stand for.

    Raises:
        RefusedError: that cannot be.
    """
    if len(layout.devices) > MOST_DEVICES or len(layout.rows) > MOST_ROWS:
        raise RefusedError(
            AgentRefusal.BAD_REPORT,
            f"layout of {len(layout.devices)} devices and {len(layout.rows)} rows: must be at most "
            f"{MOST_DEVICES} and {MOST_ROWS}",
        )
    infos = tuple(
        DeviceInfo(
            node=node,
            uuid=part.uuid,
            gpu_instance_id=part.gpu_instance_id,
            index=part.index,
            model=part.model,
            mig_profile=part.mig_profile,
            driver_version=layout.driver_version,
        )
        for part in layout.devices
    )
    if len({info.key for info in infos}) != len(infos) or not all(info.uuid for info in infos):
        raise RefusedError(AgentRefusal.BAD_REPORT, "layout names a device twice, or not at all")
    known = [at for at, name in enumerate(layout.rows) if name in _ROW_OF]
    return _Shape(
        infos,
        {
            resource_profile(part.mig_profile): part.replicas
            for part in layout.devices
            if part.replicas is not None and part.replicas > 0
        },
        len(layout.rows),
        np.array(known, dtype=np.intp),
        np.array([_ROW_OF[layout.rows[at]] for at in known], dtype=np.intp),
    )


def readings_of(
    states: Sequence[AgentState], foreign: Foreign, now: float, devices: int = 0
) -> Readings:
    """Return what some agents last said, as readings.

    Args:
        states: of different nodes.
        foreign: from where on use is foreign.
        now: seconds since the epoch.
        devices: how many devices all agents see.
    """
    starts = np.cumsum([0, *(len(state.infos) for state in states)])
    matrix = np.full((len(_ROWS), int(starts[-1])), np.nan)
    at = np.empty(int(starts[-1]))
    for state, start, stop in zip(states, starts[:-1], starts[1:], strict=True):
        state.fill(matrix, start)
        at[start:stop] = state.at
    is_told = ~np.isnan(matrix).all(axis=1)
    with np.errstate(invalid="ignore"):
        measured_at = at - np.maximum(matrix[_ROW_OF[AGE]], 0.0)
        is_foreign = (matrix[_ROW_OF[FOREIGN_MEMORY]] > foreign.memory_bytes) | (
            matrix[_ROW_OF[FOREIGN_UTILIZATION]] > foreign.utilization
        )
    return Readings(
        source=SOURCE,
        at=now,
        devices=tuple(info for state in states for info in state.infos),
        columns={signal: matrix[row] for row, signal in enumerate(_SIGNALS) if is_told[row]},
        measured_at=measured_at,
        tenants=None,
        own=Own(
            nodes=tuple(state.node for state in states),
            news=frozenset(state.node for state in states if state.is_news),
            holders={state.node: state.holders() for state in states},
            mean=within(matrix[_ROW_OF[MEAN]], 0.0, 1.0),
            mean_square=within(matrix[_ROW_OF[MEAN_SQUARE]], 0.0, 1.0),
            is_foreign=is_foreign,
            foreign_bytes=np.maximum(matrix[_ROW_OF[FOREIGN_MEMORY]], 0.0),
            xid_age=matrix[_ROW_OF[XID_AGE]],
            devices=devices,
            replicas={state.node: told for state in states if (told := state.replicas)},
        ),
    )
