"""World with a card that is partitioned by MIG."""

import numpy as np

from extender.core.devices.readings import DeviceInfo, Readings, Signal
from extender.core.nodes.inventory import NodeRecord
from testkit.world import World

PROFILES = ("3g.20gb", "2g.10gb", "1g.5gb", "1g.5gb")
ACTIVITY = (0.9, 0.0, 0.0, 0.9)


def mig_world() -> World:
    """Build a world with one card in four instances, of which the first and the last are in use."""
    world = World()
    offered = {
        f"nvidia.com/mig-{profile}": PROFILES.count(profile) for profile in dict.fromkeys(PROFILES)
    }
    world.fleet.apply_node(NodeRecord(name="node-m", allocatable=offered, capacity=offered))
    for _ in range(3):
        world.now += 10.0
        world.fleet.apply_readings(
            Readings(
                source="prometheus",
                at=world.now,
                devices=tuple(
                    DeviceInfo(
                        node="node-m",
                        uuid="GPU-m",
                        gpu_instance_id=str(number),
                        index=0,
                        model="NVIDIA A100-SXM4-40GB",
                        mig_profile=profile,
                    )
                    for number, profile in enumerate(PROFILES, start=7)
                ),
                columns={
                    Signal.GRAPHICS_ACTIVE: np.array(ACTIVITY),
                    Signal.MEMORY_USED: np.array(ACTIVITY) * (2 << 30),
                    Signal.MEMORY_TOTAL: np.full(4, 5.0 * (1 << 30)),
                },
                measured_at=np.full(4, world.now),
                tenants={},
            )
        )
        world.fleet.snapshot()
    return world
