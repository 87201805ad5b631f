"""Which device has which row: names to rows, nodes to rows, rows that are free again."""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace

import numpy as np

from extender.core.devices.readings import DeviceInfo, DeviceKey
from extender.core.nodes.snapshot import Flags, Rows

_PIECE = 2000
"""Devices that are looked up before others may have their turn: a few milliseconds' work."""

_STAND_IN = -1
"""Index of a stand-in: a device that only the node's labels or counts tell of."""

MOST_ON_NODE = 512
"""Devices of a node that are remembered, shown or not. An agent shows 256 at most; one that names
others in each report must not fill the memory, nor take ever longer to be taken over."""

_NOTHING = DeviceInfo(node="", uuid="")

Placing = Generator[tuple[tuple[int, ...], tuple[int, ...]], None, "PlacedDevices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevices:
    """Where the devices of one answer are.

    Attributes:
        rows: row of each device, in the answer's order.
        is_instance: whether each is a MIG instance.
        changed_nodes: nodes that gained or lost a device, or where one is not the same any more.
        dropped: rows whose device is gone.
        is_contested: some devices are on other nodes, as those say: their rows are below 0.
    """

    rows: Rows
    is_instance: Flags
    changed_nodes: frozenset[str] = frozenset()
    dropped: tuple[int, ...] = ()
    is_contested: bool = False

    def only(self, kept: Flags | Rows) -> "PlacedDevices":
        """Return it without some of the devices."""
        return replace(self, rows=self.rows[kept], is_instance=self.is_instance[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What one answer of a source has changed.

    Attributes:
        changed_nodes: nodes whose devices are not the same any more.
        disagree: per device of the answer, whether its own signals contradict each other.
        contested: devices that are on other nodes, as those say.
    """

    changed_nodes: frozenset[str]
    disagree: Flags
    contested: int = 0


class DeviceRegistry:
    """Devices by row; a row stays a device's own until the device is forgotten.

    Of what several sources say a device is, what was said anew last counts, and what it leaves
    open another's word fills.
    """

    def __init__(self) -> None:
        self._row_of: dict[DeviceKey, int] = {}
        self._info: list[DeviceInfo | None] = []
        self._told: dict[str, dict[int, DeviceInfo]] = {}
        self._keys: list[DeviceKey | None] = []
        self._by_node: dict[str, list[int]] = {}
        self._all_of_node: dict[str, set[int]] = {}
        self._stand_ins: dict[str, dict[str, list[int]]] = {}
        self._stand_ins_made = 0
        self._node_rows: dict[str, int] = {}
        self._spare_node_rows: list[int] = []
        self._spare: list[int] = []
        self._last_devices: tuple[DeviceInfo, ...] | None = None
        self._last: PlacedDevices | None = None
        self.drops = 0
        """Grows whenever a device is forgotten: rows that were looked up before may be others'."""

    def __len__(self) -> int:
        return len(self._info)

    def info(self, row: int) -> DeviceInfo | None:
        """Return what is known of the device in `row` besides numbers; None for a spare row."""
        return self._info[row]

    def row_of(self, key: DeviceKey) -> int | None:
        """Return the row of a device, None where it is not known."""
        return self._row_of.get(key)

    def seen_on(self, node: str) -> list[int]:
        """Return the rows of the devices that a source showed on a node, in the node's order."""
        return self._by_node.get(node, [])

    def spare_rows(self) -> list[int]:
        """Return the rows that no device has."""
        return self._spare

    def node_row(self, node: str) -> int:
        """Return the number of a node; it is another's once the node has no devices left."""
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
    ) -> Placing:
        """Give every device of a source's complete answer a row, some at a time.

        Args:
            devices: the devices.
            source: who shows them.
            is_kept: whether others show a device that this answer should show and does not.

        Yields:
            Rows that have a device which they had not before, and rows whose device is the same
            and described otherwise.

        Returns:
            Where the devices are.
        """
        if devices is self._last_devices and self._last is not None:
            return self._last
        nodes: set[str] = set()
        rows = np.empty(len(devices), dtype=np.intp)
        is_instance = np.empty(len(devices), dtype=np.bool_)
        drops = -1
        while drops != self.drops:  # else rows that were found before may be others' now
            drops = self.drops
            for start in range(0, len(devices), _PIECE):
                some = slice(start, start + _PIECE)
                rows[some], renewed, updated = self._place_some(
                    devices[some], nodes, source, is_kept
                )
                is_instance[some] = [bool(info.gpu_instance_id) for info in devices[some]]
                yield renewed, updated
            yield (), ()
        gone = [*self._former_parts(devices, rows), *self._surplus(nodes, rows)]
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
    ) -> Placing:
        """Give every device of some nodes a row, some at a time; likewise.

        A device that another node has is not given away as long as it is seen there.

        Args:
            on_nodes: nodes that the devices are complete for.
            devices: their devices.
            source: who shows them.
            is_fresh: whether a device was seen lately.
        """
        nodes: set[str] = set()
        rows = np.empty(len(devices), dtype=np.intp)
        drops = -1
        while drops != self.drops:
            drops = self.drops
            for start in range(0, len(devices), _PIECE):
                some = slice(start, start + _PIECE)
                rows[some], renewed, updated = self._place_some(
                    devices[some], nodes, source, is_fresh, is_own=True
                )
                yield renewed, updated
        dropped: list[int] = []
        if nodes:
            cards, shown = {info.uuid for info in devices}, set(rows.tolist())
            dropped = [
                row
                for node in nodes.intersection(on_nodes)
                for row in self.seen_on(node)
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
        """Give some devices rows; return these, the renewed and the updated ones of them.

        Args:
            devices: the devices.
            changed_nodes: nodes that change are added.
            source: who shows them.
            is_there: whether a device that is known on another node is to stay there.
            is_own: such a device then has no row here.
        """
        told = self._told.setdefault(source, {})
        rows: list[int] = []
        renewed: list[int] = []
        updated: list[int] = []
        nodes: set[str] = set()
        for info in devices:
            row = self._row_of.get(info.key)
            if row is None:
                row = self._take_over(info)
                if row is None:
                    row = self._add(info, info.key)
                self._by_node.setdefault(info.node, []).append(row)
                nodes.add(info.node)
                renewed.append(row)
                told[row] = info
            elif self._is_elsewhere(row, info) and is_there(row):
                rows.append(-1 if is_own else row)
                told[row] = info
                continue
            elif told.get(row) != info or self._is_elsewhere(row, info):
                told[row] = info
                described = self._filled(row, info, source)
                if described != self._info[row]:
                    is_another = self._update(row, described, nodes)
                    (renewed if is_another else updated).append(row)
            rows.append(row)
        for node in nodes:
            self.seen_on(node).sort(key=self._order)
        changed_nodes |= nodes
        return rows, tuple(renewed), tuple(updated)

    def _is_elsewhere(self, row: int, info: DeviceInfo) -> bool:
        known = self._info[row]
        return known is not None and known.node != info.node

    def _filled(self, row: int, info: DeviceInfo, source: str) -> DeviceInfo:
        """Return a device's description with what it leaves open as others said it."""
        for other, told in self._told.items():
            by_other = told.get(row)
            if other != source and by_other is not None:
                info = replace(
                    info,
                    index=by_other.index if info.index is None else info.index,
                    model=info.model or by_other.model,
                    mig_profile=info.mig_profile or by_other.mig_profile,
                    driver_version=info.driver_version or by_other.driver_version,
                )
        return info

    def stand_ins(self, node: str, resource: str, count: int) -> tuple[list[int], list[int]]:
        """Return the rows of devices that the node must have and no source shows.

        Returns:
            The rows, and those of them that are new.
        """
        rows = self._stand_ins.setdefault(node, {}).setdefault(resource, [])
        known = len(rows)
        info = DeviceInfo(node=node, uuid="", index=_STAND_IN)
        for _ in range(known, count):
            self._stand_ins_made += 1
            rows.append(self._add(info, DeviceKey((f"{node}/{self._stand_ins_made}", "unseen"))))
        return rows[:count], rows[known:]

    def is_stand_in(self, row: int) -> bool:
        """Tell whether only the node's labels or counts tell of the device."""
        info = self._info[row]
        return info is not None and info.index == _STAND_IN

    def nodes(self) -> tuple[str, ...]:
        """Return the nodes that have devices."""
        return tuple(self._all_of_node)

    def of_node(self, node: str) -> list[int]:
        """Return every row of a node, stand-ins included."""
        return sorted(self._all_of_node.get(node, ()))

    def drop(self, rows: Iterable[int]) -> set[str]:
        """Forget devices; return their nodes."""
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
            for told in self._told.values():
                told.pop(row, None)
            self._spare.append(row)
            if info.index == _STAND_IN:
                self._forget_stand_in(info.node, row)
            self._leave(info.node, row)
            nodes.add(info.node)
            self._last_devices = None
            self.drops += 1
        return nodes

    def _leave(self, node: str, row: int) -> None:
        """Take a row off a node; one without rows leaves nothing behind."""
        rows = self._all_of_node[node]
        rows.discard(row)
        if not rows:
            del self._all_of_node[node]
            self._by_node.pop(node, None)
            self._stand_ins.pop(node, None)
            if node in self._node_rows:
                self._spare_node_rows.append(self._node_rows.pop(node))

    def _former_parts(self, devices: tuple[DeviceInfo, ...], rows: Rows) -> list[int]:
        """Return what a card was divided into before: it is shown anew, without these."""
        is_shown = np.zeros(len(self._info), dtype=np.bool_)
        is_shown[rows] = True
        others = {
            row: info.uuid
            for row in np.flatnonzero(~is_shown).tolist()
            if (info := self._info[row]) is not None and info.index != _STAND_IN
        }
        cards = {info.uuid for info in devices} if others else ()  # nearly always none are left
        return [row for row, uuid in others.items() if uuid in cards]

    def _surplus(self, nodes: Iterable[str], rows: Rows) -> list[int]:
        """Return what an answer does not show of nodes with too many devices."""
        full = [node for node in nodes if len(self.seen_on(node)) > MOST_ON_NODE]
        shown = set(rows.tolist()) if full else ()
        return [row for node in full for row in self.seen_on(node) if row not in shown]

    def _update(self, row: int, info: DeviceInfo, nodes: set[str]) -> bool:
        """Take over what changed of a device; tell whether it is another one.

        A MIG instance of another profile is another device that was given the same number.
        """
        before = self._info[row]
        self._info[row] = info
        nodes.add(info.node)
        if before is None:
            return True
        if before.node != info.node:
            self._by_node[before.node].remove(row)
            self._by_node.setdefault(info.node, []).append(row)
            self._all_of_node.setdefault(info.node, set()).add(row)
            self._leave(before.node, row)
            nodes.add(before.node)
        return before.mig_profile != info.mig_profile or before.node != info.node

    def _order(self, row: int) -> tuple[int, str, int]:
        info = self._info[row]
        if info is None:
            return (0, "", 0)
        text = info.gpu_instance_id
        instance = int(text) if text.isascii() and text.isdecimal() else -1
        return (info.index if info.index is not None else 1 << 30, info.uuid, instance)

    def _forget_stand_in(self, node: str, row: int) -> None:
        for rows in self._stand_ins.get(node, {}).values():
            if row in rows:
                rows.remove(row)

    def _take_over(self, info: DeviceInfo) -> int | None:
        """Give a new device the row of one of its node's stand-ins: it is what that stood for."""
        stand_ins = next((rows for rows in self._stand_ins.get(info.node, {}).values() if rows), ())
        if not stand_ins:
            return None
        row = stand_ins[0]
        self._forget_stand_in(info.node, row)
        former = self._keys[row]
        if former is not None:
            del self._row_of[former]
        self._info[row], self._keys[row] = info, info.key
        self._row_of[info.key] = row
        return row

    def _add(self, info: DeviceInfo, key: DeviceKey) -> int:
        if self._spare:
            row = self._spare.pop()
            self._info[row], self._keys[row] = info, key
        else:
            row = len(self._info)
            self._info.append(info)
            self._keys.append(key)
        self._all_of_node.setdefault(info.node, set()).add(row)
        self._row_of[key] = row
        return row
