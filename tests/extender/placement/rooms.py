"""Pods that declare memory, and the memory that is left for further pods."""

from typing import Any

from extender.core.decision.filtering import Code
from extender.core.devices.readings import Signal
from extender.core.nodes.inventory import PodRecord
from testkit.builders import GIB, rejected, request
from testkit.world import Device, World

REFUSED = {"node": Code.NO_MEMORY}
LATER = 300.0
"""Seconds after which every pod's warm-up is over."""


def sliced(cards: int = 1, *, in_use: float = 0.0, replicas: int = 8) -> World:
    """Return a world with one time-sliced node of 80 GiB cards, read before any pod came."""
    world = World()
    world.add_node("node", cards, replicas=replicas)
    use(world, in_use)
    return world


def use(world: World, gib: float, seconds: float = 30.0, index: int = 0) -> None:
    """Apply a reading of a card with this much used memory."""
    card = world.card(index=index)
    card.values.update({Signal.MEMORY_USED: gib * GIB, Signal.MEMORY_FREE: (80 - gib) * GIB})
    world.read_after(seconds)


def tenant(
    world: World, name: str, declared: float | None = None, on: Device | None = None
) -> PodRecord:
    """Let a pod hold a share of the first card."""
    memory = None if declared is None else int(declared * GIB)
    return world.bind(name, on=[on or world.card()], memory_bytes=memory)


def refused(world: World, gib: float, **requested: Any) -> dict[str, int]:
    """Return the rejection codes for a pod that requests this much memory."""
    return rejected(world.rank(request(memory_bytes=int(gib * GIB), **requested)))


def room(world: World) -> float:
    """Return the largest memory request that passes, in GiB, to within a tenth."""
    whole = max(gib for gib in range(81) if not refused(world, gib))
    tenths = (whole + tenth / 10 for tenth in range(10))
    return max(gib for gib in tenths if not refused(world, gib))
