"""Order nodes for a pod of a group: near its placed pods, and in domains with room for the rest.

The topology is a list of labels from the nearest domain to the widest. The node itself is the
nearest domain of all, except with shared devices, on which the group's pods would slow each other
down. Nodes of equal certainty and preference are ordered by:

1. the nearest domain that the node shares with a placed pod of the group
2. the nearest domain with room for all pods of the group that are not placed yet
3. the room of the domain one level nearer, in quarters of the devices that these pods need
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from extender.core.decision.device_sets import JOINED
from extender.core.decision.evaluation import EvaluationInputs
from extender.core.decision.filtering import Code, Codes
from extender.core.decision.scoring import FIT, NOT_NEAR, PRICE, SHARED, Nearness
from extender.core.nodes.snapshot import Flags, Pool, Ratios, Rows, Tenant
from extender.core.policy import PriceMode

_NEVER: Final = (Code.GPU_TOO_SMALL, Code.WRONG_MODEL)
"""Rejections of nodes that cannot hold the pod at any time."""

_QUARTERS: Final = 4
_FINE: Final = 0.2
"""Units of all quarters together, as a fraction of the units of one level."""
_MOST_SHOWN: Final = 3
"""Domains with room for the group that an explanation names."""

_NODE: Final = "node"
"""Name of the nearest domain."""

_UNRANKED: Final = 255
"""Rank of a candidate that does not pass or is not in the pool."""

_Ranks = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Topology:
    """Domains of a pool's nodes.

    Attributes:
        labels: topology labels that at least one node has, the nearest domain first.
        domains: per label and row of the pool, number of the node's domain, -1 without the label.
        names: per label, name of each domain.
    """

    labels: tuple[str, ...] = ()
    domains: tuple[Rows, ...] = ()
    names: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[str]]) -> "Topology":
        """Build the topology by numbering the domains of each label.

        Args:
            columns: per label, each node's value in the order of the rows, "" without the label.

        Example:
            >>> made = Topology.of({"rack": ["a", "b", "a", ""], "zone": ["", "", "", ""]})
            >>> made.labels, made.domains[0].tolist()
            (('rack',), [0, 1, 0, -1])
        """
        labels, domains, names = [], [], []
        for label, values in columns.items():
            known = sorted({value for value in values if value})
            if known:
                number = {value: at for at, value in enumerate(known)} | {"": -1}
                labels.append(label)
                domains.append(np.array([number[value] for value in values], dtype=np.intp))
                names.append(tuple(known))
        return cls(labels=tuple(labels), domains=tuple(domains), names=tuple(names))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupNeed:
    """Needs of a pod's group, as far as known.

    Attributes:
        name: kind and name of the group.
        size: number of its pods.
        placed: number of its other pods by node, bound or assumed.
        rest: devices requested by its pods that are not placed yet, including this pod.
        total: devices that all of its pods request; None if the group is never refused.
        is_uniform: whether all pods that exist request as many devices as this one.
        topology: domains of the nodes of the pool of the pod's first resource.
        may_go: per row of the pool, whether the node's labels and taints admit the pod.
    """

    name: str
    size: int
    placed: Mapping[str, int] = field(default_factory=dict)
    rest: int
    total: int | None = None
    is_uniform: bool = True
    topology: Topology = field(default_factory=Topology)
    may_go: Flags | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Domain:
    """A domain with room for the rest of a group, as `answers.decisions.Domain` describes it.

    Attributes:
        label: the topology label, `node` for a node itself.
    """

    label: str
    name: str
    pods: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupFit:
    """Nearness of the candidates to a pod's group, as `answers.decisions.Group` describes it.

    Attributes:
        size: number of its pods, as far as known.
        ranks: rank of each candidate, 0 for the nearest.
        units: by rank, the score units that the nearness adds.
        words: by rank, the nearness in words.
    """

    name: str
    size: int
    placed: Mapping[str, int]
    rest: int
    fitting: tuple[_Domain, ...] = ()
    too_few: int | None = None
    ranks: _Ranks = field(default_factory=lambda: np.zeros(0, np.uint8), repr=False)
    units: tuple[float, ...] = ()
    words: tuple[str, ...] = ()

    def units_of_all(self) -> Ratios:
        """Return the score units that nearness adds to each candidate."""
        table = np.zeros(_UNRANKED + 1)
        table[: len(self.units)] = self.units
        found: Ratios = table[self.ranks]
        return found

    def take(self, rows: Rows) -> "GroupFit":
        """Return the result for the candidates at `rows`, in this order."""
        return replace(self, ranks=self.ranks[rows])

    def of(self, at: int | None) -> Nearness:
        """Return the nearness of a candidate by index; `NOT_NEAR` for None or an unranked one."""
        rank = _UNRANKED if at is None else int(self.ranks[at])
        if rank >= len(self.units):
            return NOT_NEAR
        return Nearness(self.units[rank], self.words[rank], max(self.units))


def fit_group(
    need: GroupNeed, pool: Pool, rows: Rows, codes: Codes, inputs: EvaluationInputs
) -> GroupFit:
    """Rank the candidates of a pod by their nearness to its group.

    Args:
        pool: pool of the pod's first resource.
        rows: row of each candidate in the pool, -1 if it is not there.
    """
    count = inputs.devices.count
    unit = count if need.is_uniform else 1
    passing = (codes == Code.PASSES) & (rows >= 0)
    free = _free_devices(pool, inputs.overlay)[rows]
    # kube-scheduler says that a candidate fits: our own count may be late.
    room = np.where(passing, np.maximum(free, count) // unit, 0)
    needed = -(-need.rest // unit)
    domains = [np.where(rows < 0, -1, of_label[rows]) for of_label in need.topology.domains]
    is_shared = pool.batch.is_shared[rows]
    rooms = [np.where(is_shared, 0, room), *(_sums(domain, room) for domain in domains)]
    wanted = max(min(needed, max(int(each.max(initial=0)) for each in rooms)), 1)
    fits = _first_level([each >= wanted for each in rooms])
    nearer = np.choose(np.maximum(np.minimum(fits, len(rooms)) - 1, 0), rooms)
    lacking = _QUARTERS - np.minimum(nearer * _QUARTERS // wanted, _QUARTERS)
    levels = len(rooms) + 1
    order = _nearness(need, pool, rows, (domains, is_shared)) * levels + fits
    order = order * (_QUARTERS + 1) + np.where(fits == 0, 0, lacking)
    kinds, ranks = np.unique(order[passing], return_inverse=True)
    all_ranks = np.full(len(rows), _UNRANKED, dtype=np.uint8)
    all_ranks[passing] = np.minimum(ranks, _UNRANKED - 1)
    words = _Words(
        levels=(_NODE, *map(_short, need.topology.labels)),
        has_placed=bool(need.placed),
        is_whole=wanted >= needed,
        is_known=bool(domains) or not is_shared.all(),
    )
    return GroupFit(
        name=need.name,
        size=need.size,
        placed=need.placed,
        rest=-(-need.rest // count),
        fitting=_fitting(need, pool, rows, (rooms, domains), needed),
        ranks=all_ranks,
        units=_units(kinds, _budget(inputs.policy.prices.mode)),
        words=tuple(words.of(*divmod(kind // (_QUARTERS + 1), levels)) for kind in kinds.tolist()),
    )


def _budget(price_mode: PriceMode) -> float:
    """Return the score units left for nearness, between the largest fit and a step of certainty."""
    return FIT - 1 - SHARED - JOINED - PRICE * (price_mode is PriceMode.PREFER)


def _units(kinds: Rows, most: float) -> tuple[float, ...]:
    """Return the score units of each rank of nearness.

    Args:
        kinds: by rank, the levels and after them the quarters; ascending.
        most: units between the first rank and the last.
    """
    levels, at = np.unique(kinds // (_QUARTERS + 1), return_inverse=True)
    step = most / max(len(levels) - 1, 1) / (1 + _FINE)
    spare = 1 - kinds % (_QUARTERS + 1) / _QUARTERS
    units = step * (len(levels) - 1 - at + _FINE * spare)
    return tuple((units - units.min(initial=np.inf)).tolist())


def too_few(need: GroupNeed, pool: Pool, codes: Codes, count: int) -> int | None:
    """Return the number of a group's pods for which the cluster has devices, None if for all.

    Devices count no matter which pods hold them. Once a pod is placed the group is not refused. The
    result counts devices instead of pods if the group's pods request different numbers.

    Args:
        pool: pool of the pod's first resource.
        codes: verdict on each row of the pool.
        count: devices that the pod requests.
    """
    if need.total is None or need.placed:
        return None
    unit = count if need.is_uniform else 1
    offered = pool.batch.allocatable + pool.batch.withdrawn
    for at in pool.unwritten:
        offered[at] = pool.rows[at].allocatable + pool.rows[at].withdrawn
    is_possible = ~np.isin(codes, _NEVER)
    if need.may_go is not None:
        is_possible &= need.may_go
    holds = int((offered // unit)[is_possible].sum())
    return holds if holds < -(-need.total // unit) else None


def _free_devices(pool: Pool, overlay: Mapping[str, tuple[Tenant, ...]]) -> Rows:
    """Return the number of free devices or replicas of each node of a pool."""
    free: Rows = pool.batch.allocatable - pool.batch.held
    for at in pool.unwritten:
        free[at] = pool.rows[at].allocatable - pool.rows[at].held
    for node, tenants in overlay.items():
        at_node = pool.row_of.get(node)
        if at_node is not None:
            free[at_node] -= sum(tenant.count for tenant in tenants)
    return free


def _sums(domain: Rows, room: Rows) -> Rows:
    """Return the room of each candidate's domain, 0 without a domain."""
    sums = np.bincount(domain + 1, weights=room).astype(np.intp)
    sums[0] = 0
    found: Rows = sums[domain + 1]
    return found


def _first_level(holds: Sequence[Flags]) -> Rows:
    """Return per candidate the first level whose flag is set, or the number of levels."""
    table = np.stack([*holds, np.ones_like(holds[0])])
    found: Rows = table.argmax(axis=0)
    return found


def _nearness(
    need: GroupNeed, pool: Pool, rows: Rows, by_row: tuple[Sequence[Rows], Flags]
) -> Rows:
    """Return per candidate the nearest level that it shares with a placed pod of the group."""
    domains, is_shared = by_row
    placed = [pool.row_of[node] for node in need.placed if node in pool.row_of]
    if not placed:
        return np.zeros(len(rows), dtype=np.intp)
    here = np.zeros(len(pool.rows) + 1, dtype=np.bool_)
    here[placed] = True
    shares = [here[rows] & ~is_shared]
    for of_label, domain, names in zip(
        need.topology.domains, domains, need.topology.names, strict=True
    ):
        near = np.zeros(len(names) + 1, dtype=np.bool_)
        near[of_label[placed]] = True
        near[-1] = False  # nodes without the label
        shares.append(near[domain])
    return _first_level(shares)


def _fitting(
    need: GroupNeed,
    pool: Pool,
    rows: Rows,
    by_level: tuple[Sequence[Rows], Sequence[Rows]],
    wanted: int,
) -> tuple[_Domain, ...]:
    """Return the nearest domains with room for the rest of the group, the most room first."""
    rooms, domains = by_level
    for level, room in enumerate(rooms):
        at = np.flatnonzero(room >= wanted)
        if not at.size:
            continue
        if level == 0:
            found = {pool.nodes[rows[one]]: int(room[one]) for one in at.tolist()}
        else:
            names = need.topology.names[level - 1]
            numbers, first = np.unique(domains[level - 1][at], return_index=True)
            found = dict(
                zip((names[one] for one in numbers.tolist()), room[at[first]].tolist(), strict=True)
            )
        label = need.topology.labels[level - 1] if level else _NODE
        largest = sorted(found.items(), key=lambda one: (-one[1], one[0]))[:_MOST_SHOWN]
        return tuple(_Domain(label=label, name=name, pods=pods) for name, pods in largest)
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """Describes how near a node is to its group.

    Attributes:
        levels: names of the levels, the nearest first.
        has_placed: whether a pod of the group is placed.
        is_whole: whether some domain has room for all of the rest.
        is_known: whether any domain is known.
    """

    levels: tuple[str, ...]
    has_placed: bool
    is_whole: bool
    is_known: bool

    def of(self, near: int, fits: int) -> str:
        """Return the words for the nearest shared level, and the nearest one with room."""
        if not self.is_known:
            return ""
        if self.has_placed and near < len(self.levels):
            return f"same {self.levels[near]} as its group"
        away = "apart from its group, " if self.has_placed else ""
        if fits == len(self.levels):
            return f"{away}no room near it for the rest of its group"
        rest = "room for the rest of its group" if self.is_whole else "the most room for its group"
        return f"{away}{self.levels[fits]} with {rest}"


def _short(label: str) -> str:
    """Return the last part of a label.

    Example:
        >>> _short("topology.kubernetes.io/rack")
        'rack'
    """
    return label.rpartition("/")[2]
