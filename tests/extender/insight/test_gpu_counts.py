"""The counts of a node's GPUs and MIG instances add up, for any fleet."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord
from extender.insight.views import gpus_of, node_views
from testkit.cards import CARD_BYTES
from testkit.world import World

PROFILE = "1g.10gb"
SIGHTS = {
    "idle": (0.0, 0.0, 0.0),
    "busy": (0.9, 0.8, 0.0),
    "foreign": (0.9, 0.4, 0.0),
    "dead": (0.0, 0.0, 79.0),
    "silent": (np.nan, np.nan, np.nan),
}
"""Activity, ratio of used memory, and XID of each state."""

DEVICE = st.tuples(st.sampled_from(sorted(SIGHTS)), st.booleans())
"""State of a device, and whether a pod holds it."""

CARDS = st.lists(st.one_of(DEVICE, st.lists(DEVICE, min_size=1, max_size=7)), max_size=8)
"""Cards of a node: whole ones, or the instances of one in MIG mode."""


@given(st.lists(CARDS, min_size=1, max_size=3))
def test_each_device_counts_once_and_mig_instances_count_apart(
    nodes: list[list[Any]],
) -> None:
    world = _world(nodes)
    names = [f"node-{at}" for at in range(len(nodes))]
    snapshot = world.fleet.snapshot()

    views = node_views(world.fleet, snapshot, names)

    for cards, (node, _) in zip(nodes, views, strict=True):
        whole = sum(not isinstance(card, list) for card in cards)
        instances = sum(len(card) for card in cards if isinstance(card, list))
        assert [node.gpu_states.total, node.mig_states.total] == [whole, instances]
    shown = [gpu for gpus in gpus_of(world.fleet, snapshot, names).values() for gpu in gpus]
    total: Counter[str] = Counter()
    for node, _ in views:
        for one in (node.gpu_states, node.mig_states):
            total.update(msgspec.structs.asdict(one))
    held = [gpu for gpu in shown if gpu.state == "idle" and gpu.replicas_used]
    assert total["held_idle"] == len(held)
    for state in ("busy", "foreign", "unhealthy", "excluded"):
        assert total[state] == sum(gpu.state == state for gpu in shown)


def _world(nodes: list[list[Any]]) -> World:
    """Return a world with these nodes, after three readings of their devices."""
    world = World()
    infos, sights, tenants = [], [], {}
    for at, cards in enumerate(nodes):
        node, resources = f"node-{at}", Counter[str]()
        for index, one in enumerate(cards):
            parts = one if isinstance(one, list) else [one]
            for number, (sight, is_held) in enumerate(parts, 7):
                is_part = isinstance(one, list)
                info = DeviceInfo(
                    node=node,
                    uuid=f"GPU-{at}-{index}",
                    index=index,
                    gpu_instance_id=str(number) if is_part else "",
                    mig_profile=PROFILE if is_part else "",
                    model="NVIDIA H100 80GB HBM3",
                )
                resources[f"nvidia.com/mig-{PROFILE}" if is_part else "nvidia.com/gpu"] += 1
                infos.append(info)
                sights.append(SIGHTS[sight])
                if is_held:
                    tenants[info.key] = (f"team/pod-{at}-{index}-{number}",)
        world.fleet.apply_node(NodeRecord(name=node, allocatable=resources, capacity=resources))
    columns = np.array(sights).reshape(-1, 3).T
    for _ in range(3):
        world.now += 10.0
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=tuple(infos),
                columns={
                    Signal.GPU_UTILIZATION: columns[0],
                    Signal.MEMORY_USED: columns[1] * CARD_BYTES,
                    Signal.MEMORY_TOTAL: np.full(len(infos), float(CARD_BYTES)),
                    Signal.XID: columns[2],
                },
                measured_at=np.full(len(infos), world.now),
                tenants=tenants,
            )
        )
    return world
