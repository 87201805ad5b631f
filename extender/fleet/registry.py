"""Assign rows to devices and numbers to nodes, and reuse them."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from extender.core.devices.readings import DeviceInfo, DeviceKey
from extender.core.nodes.snapshot import Flags, Rows
from extender.core.untyped import number_of

_PIECE = 2000
"""Devices looked up per cooperative step: a few milliseconds."""

_PLACEHOLDER = -1
"""Index of a placeholder: a device that only the node's labels or counts imply."""

_MOST_ON_NODE = 512
"""Maximum number of devices remembered for a node, reported or not. An agent reports 256 at most.
An agent that reports different devices each time must not fill the memory."""

_NOTHING = DeviceInfo(node="", uuid="")

_Placing = Generator[tuple[tuple[int, ...], tuple[int, ...]], None, "PlacedDevices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevices:
    """Rows of the devices of one answer.

    Attributes:
        rows: row of each device, in the answer's order.
        is_instance: whether each device is a MIG instance.
        changed_nodes: nodes that gained or lost a device, or where a device was replaced.
        dropped: rows whose device was removed.
        is_contested: whether other nodes report some of the devices; the rows of these are
            negative.
    """

    rows: Rows
    is_instance: Flags
    changed_nodes: frozenset[str] = frozenset()
    dropped: tuple[int, ...] = ()
    is_contested: bool = False

    def only(self, kept: Flags | Rows) -> "PlacedDevices":
        """Return the rows of the kept devices."""
        return replace(self, rows=self.rows[kept], is_instance=self.is_instance[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """Changes by one answer of a source.

    Attributes:
        changed_nodes: nodes whose devices have changed.
        disagree: for each device of the answer, whether its signals contradict each other.
        contested: number of devices that other nodes report.
    """

    changed_nodes: frozenset[str]
    disagree: Flags
    contested: int = 0


class DeviceRegistry:
    """Devices by row; a device keeps its row until it is dropped.

    If several sources describe a device, the description that changed last counts. Its missing
    parts come from the other sources.
    """

    def __init__(self) -> None:
        self._row_of: dict[DeviceKey, int] = {}
        self._info: list[DeviceInfo | None] = []
        self._descriptions: dict[str, dict[int, DeviceInfo]] = {}
        self._keys: list[DeviceKey | None] = []
        self._by_node: dict[str, list[int]] = {}
        self._all_of_node: dict[str, list[int]] = {}
        self._placeholders: dict[str, dict[str, list[int]]] = {}
        self._placeholders_made = 0
        self._node_rows: dict[str, int] = {}
        self._spare_node_rows: list[int] = []
        self._spare: list[int] = []
        self._last_devices: tuple[DeviceInfo, ...] | None = None
        self._last: PlacedDevices | None = None
        self.drops = 0
        """Number of dropped devices. If it has changed, rows from earlier look-ups may belong to
        others."""

    def __len__(self) -> int:
        return len(self._info)

    def info(self, row: int) -> DeviceInfo | None:
        """Return the identity of the device in a row; None for a spare row."""
        return self._info[row]

    def row_of(self, key: DeviceKey) -> int | None:
        """Return the row of a device, None if it is unknown."""
        return self._row_of.get(key)

    def reported_on(self, node: str) -> list[int]:
        """Return the rows of the devices that a source reported on a node, in the node's order."""
        return self._by_node.get(node, [])

    def spare_rows(self) -> list[int]:
        """Return the rows without a device."""
        return self._spare

    def node_row(self, node: str) -> int:
        """Return the number of a node; it is reused after the node's last device was dropped."""
        number = self._node_rows.get(node)
        if number is None:
            spare = self._spare_node_rows
            number = self._node_rows[node] = spare.pop() if spare else len(self._node_rows)
        return number

    def place(
        self,
        devices: tuple[DeviceInfo, ...],
        source: str = "",
        *,
        is_kept: Callable[[int], bool] = lambda _: False,
    ) -> _Placing:
        """Assign a row to every device of a source's complete answer, in cooperative steps.

        Args:
            is_kept: returns whether other sources report the device of a row if this answer lacks
                it.

        Yields:
            Rows that have a new device, and rows whose device has another description.

        Returns:
            The rows of the devices.
        """
        if devices is self._last_devices and self._last is not None:
            return self._last
        nodes: set[str] = set()
        rows = np.empty(len(devices), dtype=np.intp)
        is_instance = np.empty(len(devices), dtype=np.bool_)
        drops = -1
        while drops != self.drops:  # repeat: rows found before may belong to other devices
            drops = self.drops
            for start in range(0, len(devices), _PIECE):
                some = slice(start, start + _PIECE)
                rows[some], assigned, updated = self._place_some(
                    devices[some], nodes, source, is_kept
                )
                is_instance[some] = [bool(info.gpu_instance_id) for info in devices[some]]
                yield assigned, updated
            yield (), ()
        gone = [*self._former_instances(devices, rows), *self._surplus(nodes, rows)]
        dropped = [row for row in gone if not is_kept(row)]
        nodes |= self.drop(dropped)
        self._last_devices, self._last = devices, PlacedDevices(rows=rows, is_instance=is_instance)
        return PlacedDevices(
            rows=rows,
            is_instance=is_instance,
            changed_nodes=frozenset(nodes),
            dropped=tuple(dropped),
        )

    def place_on(
        self,
        on_nodes: Iterable[str],
        devices: tuple[DeviceInfo, ...],
        source: str,
        is_fresh: Callable[[int], bool],
    ) -> _Placing:
        """Assign a row to every device of the given nodes, in cooperative steps, as in `place`.

        A device stays on another node as long as it is reported there.

        Args:
            on_nodes: nodes whose devices are complete in the answer.
            is_fresh: returns whether a row's device was reported recently.
        """
        nodes: set[str] = set()
        rows = np.empty(len(devices), dtype=np.intp)
        drops = -1
        while drops != self.drops:
            drops = self.drops
            for start in range(0, len(devices), _PIECE):
                some = slice(start, start + _PIECE)
                rows[some], assigned, updated = self._place_some(
                    devices[some], nodes, source, is_fresh, is_own=True
                )
                yield assigned, updated
        dropped: list[int] = []
        if nodes:
            cards, shown = {info.uuid for info in devices}, set(rows.tolist())
            dropped = [
                row
                for node in nodes.intersection(on_nodes)
                for row in self.reported_on(node)
                if row not in shown and (self._info[row] or _NOTHING).uuid in cards
            ]
            dropped += self._surplus(nodes.intersection(on_nodes), rows)
        nodes |= self.drop(dropped)
        return PlacedDevices(
            rows=rows,
            is_instance=np.array([bool(info.gpu_instance_id) for info in devices], dtype=np.bool_),
            changed_nodes=frozenset(nodes),
            dropped=tuple(dropped),
            is_contested=bool((rows < 0).any()),
        )

    def _place_some(
        self,
        devices: tuple[DeviceInfo, ...],
        changed_nodes: set[str],
        source: str,
        is_there: Callable[[int], bool],
        *,
        is_own: bool = False,
    ) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
        """Assign rows to some devices; return all rows, those with new devices, and updated ones.

        Args:
            changed_nodes: changed nodes are added to this set.
            is_there: returns whether a row's device stays on the other node where it is known.
            is_own: whether a device that stays on another node gets the row -1 in this answer.
        """
        described = self._descriptions.setdefault(source, {})
        rows: list[int] = []
        assigned: list[int] = []
        updated: list[int] = []
        nodes: set[str] = set()
        for info in devices:
            key = info.key
            row = self._row_of.get(key)
            if row is None:
                row = self._replace_placeholder(info, key)
                if row is None:
                    row = self._add(info, key)
                self._by_node.setdefault(info.node, []).append(row)
                nodes.add(info.node)
                assigned.append(row)
                described[row] = info
            elif self._is_elsewhere(row, info) and is_there(row):
                rows.append(-1 if is_own else row)
                described[row] = info
                continue
            elif described.get(row) != info or self._is_elsewhere(row, info):
                described[row] = info
                completed = self._completed(row, info, source)
                if completed != self._info[row]:
                    is_another = self._update(row, completed, nodes)
                    (assigned if is_another else updated).append(row)
            rows.append(row)
        for node in nodes:
            self.reported_on(node).sort(key=self._order)
        changed_nodes |= nodes
        return rows, tuple(assigned), tuple(updated)

    def _is_elsewhere(self, row: int, info: DeviceInfo) -> bool:
        known = self._info[row]
        return known is not None and known.node != info.node

    def _completed(self, row: int, info: DeviceInfo, source: str) -> DeviceInfo:
        """Return a device's description with missing parts from other sources."""
        for other, described in self._descriptions.items():
            by_other = described.get(row)
            if other != source and by_other is not None:
                info = replace(
                    info,
                    index=by_other.index if info.index is None else info.index,
                    model=info.model or by_other.model,
                    mig_profile=info.mig_profile or by_other.mig_profile,
                    driver_version=info.driver_version or by_other.driver_version,
                    place=info.place or by_other.place,
                )
        return info

    def placeholders(self, node: str, resource: str, count: int) -> tuple[list[int], list[int]]:
        """Return the rows of devices that the node must have and no source reports.

        Returns:
            All these rows, and the new ones among them.
        """
        rows = self._placeholders.setdefault(node, {}).setdefault(resource, [])
        known = len(rows)
        info = DeviceInfo(node=node, uuid="", index=_PLACEHOLDER)
        for _ in range(known, count):
            self._placeholders_made += 1
            # No source can report it: a reported device has a UUID.
            rows.append(self._add(info, DeviceKey(("", str(self._placeholders_made)))))
        return rows[:count], rows[known:]

    def is_placeholder(self, row: int) -> bool:
        """Return whether the row is a placeholder for an unreported device."""
        info = self._info[row]
        return info is not None and info.index == _PLACEHOLDER

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that have devices."""
        return tuple(self._all_of_node)

    def of_node(self, node: str) -> list[int]:
        """Return all rows of a node, placeholders included."""
        return sorted(self._all_of_node.get(node, ()))

    def drop(self, rows: Iterable[int]) -> set[str]:
        """Drop devices; return their nodes."""
        nodes = set()
        for row in rows:
            info, key = self._info[row], self._keys[row]
            if info is None or key is None:
                continue
            del self._row_of[key]
            seen = self._by_node.get(info.node, [])
            if row in seen:
                seen.remove(row)
            self._info[row] = self._keys[row] = None
            for described in self._descriptions.values():
                described.pop(row, None)
            self._spare.append(row)
            if info.index == _PLACEHOLDER:
                self._forget_placeholder(info.node, row)
            self._remove_from_node(info.node, row)
            nodes.add(info.node)
            self._last_devices = None
            self.drops += 1
        return nodes

    def _remove_from_node(self, node: str, row: int) -> None:
        """Remove a row from a node, and the node with its last row."""
        rows = self._all_of_node[node]
        rows.remove(row)
        if not rows:
            del self._all_of_node[node]
            self._by_node.pop(node, None)
            self._placeholders.pop(node, None)
            if node in self._node_rows:
                self._spare_node_rows.append(self._node_rows.pop(node))

    def _former_instances(self, devices: tuple[DeviceInfo, ...], rows: Rows) -> list[int]:
        """Return former instances of reported cards that the answer no longer contains."""
        is_shown = np.zeros(len(self._info), dtype=np.bool_)
        is_shown[rows] = True
        others = {
            row: info.uuid
            for row in np.flatnonzero(~is_shown).tolist()
            if (info := self._info[row]) is not None and info.index != _PLACEHOLDER
        }
        cards = {info.uuid for info in devices} if others else ()  # there are nearly always none
        return [row for row, uuid in others.items() if uuid in cards]

    def _surplus(self, nodes: Iterable[str], rows: Rows) -> list[int]:
        """Return unreported devices of nodes with too many devices."""
        full = [node for node in nodes if len(self.reported_on(node)) > _MOST_ON_NODE]
        shown = set(rows.tolist()) if full else ()
        return [row for node in full for row in self.reported_on(node) if row not in shown]

    def _update(self, row: int, info: DeviceInfo, nodes: set[str]) -> bool:
        """Update the description of a row's device; return whether it is another device.

        A MIG instance with another profile is a new device that reuses the number.
        """
        before = self._info[row]
        self._info[row] = info
        nodes.add(info.node)
        if before is None:
            return True
        if before.node != info.node:
            self._by_node[before.node].remove(row)
            self._by_node.setdefault(info.node, []).append(row)
            self._all_of_node.setdefault(info.node, []).append(row)
            self._remove_from_node(before.node, row)
            nodes.add(before.node)
        return before.mig_profile != info.mig_profile or before.node != info.node

    def _order(self, row: int) -> tuple[float, str, float]:
        info = self._info[row] or _NOTHING
        instance = number_of(info.gpu_instance_id)
        return (
            inf if info.index is None else info.index,
            info.uuid,
            -inf if instance is None else instance,
        )

    def _forget_placeholder(self, node: str, row: int) -> None:
        placeholders = self._placeholders.get(node, {})
        for resource, rows in list(placeholders.items()):
            if row in rows:
                rows.remove(row)
            if not rows:
                del placeholders[resource]

    def _replace_placeholder(self, info: DeviceInfo, key: DeviceKey) -> int | None:
        """Give a new device the row of one of its node's placeholders; return None without one."""
        placeholders = next(iter(self._placeholders.get(info.node, {}).values()), ())
        if not placeholders:
            return None
        row = placeholders[0]
        self._forget_placeholder(info.node, row)
        former = self._keys[row]
        if former is not None:
            del self._row_of[former]
        self._info[row], self._keys[row] = info, key
        self._row_of[key] = row
        return row

    def _add(self, info: DeviceInfo, key: DeviceKey) -> int:
        if self._spare:
            row = self._spare.pop()
            self._info[row], self._keys[row] = info, key
        else:
            row = len(self._info)
            self._info.append(info)
            self._keys.append(key)
        self._all_of_node.setdefault(info.node, []).append(row)
        self._row_of[key] = row
        return row
