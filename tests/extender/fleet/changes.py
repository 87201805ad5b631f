"""Changes of a fleet, its readings, and the columns of its snapshot."""

from dataclasses import fields, replace

import numpy as np

from extender.core.devices.readings import DeviceKey, Readings, Signal
from extender.core.nodes.inventory import NodeRecord, PodRecord
from extender.core.nodes.snapshot import Batch, Telemetry
from testkit.builders import GIB, GPU, request
from testkit.world import World


def columns(*parts: Telemetry | Batch) -> dict[str, list[object]]:
    """Return all columns of telemetry and batches as lists."""
    return {
        f"{type(part).__name__}.{column.name}": np.asarray(getattr(part, column.name)).tolist()
        for part in parts
        for column in fields(part)
        if column.compare and column.name != "telemetry"
    }


def node_record(number: int, gpus: int = 8) -> NodeRecord:
    return NodeRecord(name=f"node-{number}", allocatable={GPU: gpus}, capacity={GPU: gpus})


def bulk(world: World, count: int, gpus: int = 8) -> None:
    world.fleet.replace_nodes([node_record(number, gpus) for number in range(count)])


CHANGES = ("bind", "end", "read", "show", "add", "remove", "widen", "fail", "place", "ask")


def change(world: World, what: str, number: int, pods: list[PodRecord]) -> None:
    """Apply the change that `what` names."""
    node = f"node-{number % 4}"
    known = node in world.fleet.nodes
    if what == "bind" and known:
        device = [world.card(node, number % 2)] if number % 3 else []
        pods.append(world.bind(f"pod-{len(pods)}", node, on=device))
    elif what == "end" and pods:
        world.end(pods.pop(number % len(pods)))
    elif what == "read":
        world.clock.now += 30
        world.read(GRAPHICS_ACTIVE=number / 20, XID=79.0 if number == 13 else 0.0)
    elif what == "show":
        world.card(node, 1).is_shown = not world.card(node, 1).is_shown
    elif what == "add":
        world.fleet.apply_node(node_record(number % 7, gpus=2))
    elif what == "remove":
        world.fleet.remove_node(node)
    elif what == "widen" and known:
        record = replace(world.fleet.nodes[node], allocatable={GPU: 2 + number % 3}, capacity={})
        world.fleet.apply_node(record)
    elif what == "fail" and known:
        world.bind(f"bad-{number}", node, is_failed_early=True)
    elif what == "place":
        world.place(f"assumed-{number}")
    else:
        world.rank(request(1 + number % 2))


def reported(world: World, *shares: tuple[DeviceKey, str, int]) -> None:
    """Apply an answer with the memory of pods, as exporters report it for shared devices."""
    world.clock.now += 30.0
    card = world.card()
    world.fleet.apply_readings(
        Readings(
            source="prometheus",
            at=world.now,
            devices=(card.info,),
            columns={signal: np.array([value]) for signal, value in card.values.items()},
            measured_at=np.array([world.now]),
            tenants={card.info.key: card.tenants},
            shares=shares,
        )
    )


def uses(world: World, used: float) -> None:
    """Set the memory in use on the only card, in bytes."""
    world.card().values.update({Signal.MEMORY_USED: used, Signal.MEMORY_FREE: 80 * GIB - used})
