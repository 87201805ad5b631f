"""Find the devices of a node that NVLink joins, and how its kubelet aligns devices to NUMA nodes.

A set of devices is a bit mask of their slots: bit 0 is the first device of the node.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache
from typing import Final

POLICY_LABEL: Final = "idlegpu.io/topology-policy"
SCOPE_LABEL: Final = "idlegpu.io/topology-scope"
"""Labels of a node with the kubelet's `topologyManagerPolicy` and `topologyManagerScope`."""

POLICIES: Final = ("none", "best-effort", "restricted", "single-numa-node")
SCOPES: Final = ("container", "pod")


class Alignment(IntFlag):
    """Rule by which the kubelet refuses pods (TopologyAffinityError), as a number for columns."""

    NONE = 0
    """Refuses no pod: the policy is `none`, `best-effort` or unknown."""
    SINGLE = 1
    """`single-numa-node`: refuses pods whose devices are not all on one NUMA node."""
    RESTRICTED = 2
    """`restricted`: refuses pods that need more NUMA nodes than on an empty node."""
    BY_POD = 4
    """The devices of all containers are aligned together, else those of each container."""


_POLICIES: Final = {"single-numa-node": Alignment.SINGLE, "restricted": Alignment.RESTRICTED}


def alignment_by(policy: str, scope: str) -> Alignment:
    """Return the alignment for the kubelet's policy and scope; `NONE` for an unknown policy.

    Example:
        >>> alignment_by("single-numa-node", "container").name
        'SINGLE'
    """
    found = _POLICIES.get(policy, Alignment.NONE)
    return found | Alignment.BY_POD if found and scope == "pod" else found


def alignment_on(labels: Mapping[str, str]) -> Alignment | None:
    """Return the alignment by a node's labels, None without the label."""
    policy = labels.get(POLICY_LABEL)
    return None if policy is None else alignment_by(policy, labels.get(SCOPE_LABEL, ""))


_SWITCH: Final = "switch"
"""NVLink peer of a card on an NVSwitch, which joins all cards on it."""

_MOST_DEVICES: Final = 52
"""Nodes with more devices have no sets: columns store masks as floats, exact up to 2^53."""

_MOST_LINKED: Final = 16
"""Maximum number of devices of a node to search for joined sets. No server has more cards on one
NVLink, and 16 cards have at most a few hundred sets, even if an agent reports nonsense."""

_REMEMBERED: Final = 1024
"""Cache size of `_joined`: nodes of one kind are wired alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a device in its node, from the node's agent.

    Attributes:
        uuid: UUID of the card, "" for a MIG instance, which no NVLink joins.
        numa_node: NUMA node, None if unknown.
        nvlink_peers: UUIDs of the cards at the other end of its NVLinks, or `_SWITCH`.
        alignment: the kubelet's alignment of devices, None if the agent cannot read it.
    """

    uuid: str = ""
    numa_node: int | None = None
    nvlink_peers: tuple[str, ...] = ()
    alignment: Alignment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceSets:
    """Sets of a node's devices, one per slot and padded with 0; () if none is known.

    Attributes:
        joined: the largest sets in which NVLink joins every two devices.
        numa: the devices of each NUMA node, in the order of their numbers.
    """

    joined: tuple[int, ...] = ()
    numa: tuple[int, ...] = ()


_UNKNOWN: Final = _DeviceSets()


def device_sets(places: Sequence[Place | None]) -> _DeviceSets:
    """Return the sets of a node's devices.

    Args:
        places: place of the device in each slot, None if unknown.

    Example:
        >>> pair = [Place(uuid="a", nvlink_peers=("b",)), Place(uuid="b", nvlink_peers=("a",))]
        >>> device_sets([*pair, Place(uuid="c")]).joined
        (3, 0, 0)
    """
    if not any(places) or len(places) > _MOST_DEVICES:
        return _UNKNOWN
    numa: dict[int, int] = {}
    for slot, place in enumerate(places):
        if place is not None and place.numa_node is not None:
            numa[place.numa_node] = numa.get(place.numa_node, 0) | 1 << slot
    joined = _joined(_linked(places)) if len(places) <= _MOST_LINKED else ()
    return _DeviceSets(
        joined=_padded(joined, len(places)),
        numa=_padded(tuple(numa[number] for number in sorted(numa)), len(places)),
    )


def _padded(sets: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Pad the sets with 0, or truncate them, to one per slot; return () if there are none."""
    return (*sets[:length], *[0] * (length - len(sets))) if sets else ()


def _linked(places: Sequence[Place | None]) -> tuple[int, ...]:
    """Return each device's NVLink peers as a set of devices."""
    slots = {place.uuid: slot for slot, place in enumerate(places) if place and place.uuid}
    switched = sum(
        1 << slot for slot, place in enumerate(places) if place and _SWITCH in place.nvlink_peers
    )
    linked = [0] * len(places)
    for slot, place in enumerate(places):
        for peer in place.nvlink_peers if place and place.uuid else ():
            at = slots.get(peer)
            if at is not None and at != slot:  # an agent may have read one end of a link only
                linked[slot] |= 1 << at
                linked[at] |= 1 << slot
        if switched >> slot & 1:
            linked[slot] |= switched & ~(1 << slot)
    return tuple(linked)


@lru_cache(maxsize=_REMEMBERED)
def _joined(linked: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest sets in which every two devices are linked, largest first."""
    whole = (1 << len(linked)) - 1
    found = [found for found in _cliques(linked, 0, whole, 0) if found.bit_count() > 1]
    return tuple(sorted(found, key=lambda found: (-found.bit_count(), found)))


def _cliques(linked: Sequence[int], chosen: int, open_: int, done: int) -> Iterator[int]:
    """Yield every largest set of linked devices: the algorithm of Bron and Kerbosch with a pivot.

    Args:
        linked: the devices linked to each device.
        chosen: devices of the set so far.
        open_: further devices linked to all of them.
        done: devices linked to all of them whose sets have been found.
    """
    if not open_ | done:
        yield chosen
        return
    pivot = max(_members(open_ | done), key=lambda slot: (linked[slot] & open_).bit_count())
    for slot in _members(open_ & ~linked[pivot]):
        near = linked[slot]
        yield from _cliques(linked, chosen | 1 << slot, open_ & near, done & near)
        open_, done = open_ & ~(1 << slot), done | 1 << slot


def _members(devices: int) -> list[int]:
    return [slot for slot in range(devices.bit_length()) if devices >> slot & 1]
