"""Reports of node agents for tests of the fleet."""

from collections.abc import Mapping

import numpy as np

from extender.core.devices.readings import (
    Column,
    DeviceInfo,
    DeviceKey,
    Holders,
    Own,
    Readings,
    Signal,
)
from testkit.windows import summarize
from testkit.world import IDLE, Device, World

HOLD = 25.0
NAN = float("nan")


class Agents:
    """Agents of a test world's nodes, including devices that Prometheus does not know."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.fleet.prefer("agent", HOLD)
        self.pods: dict[DeviceKey, tuple[str, ...]] | None = {}
        self.uids: dict[str, str] = {}
        self.replicas: dict[str, int] = {}
        """Replicas of each device by MIG profile, as the kubelet reports them."""

    def report(
        self,
        node: str = "node",
        *devices: DeviceInfo,
        age: float = 0.0,
        mean: tuple[float, float] | None = None,
        is_foreign: bool = False,
        foreign_bytes: float | None = None,
        xid_age: float = NAN,
        holders_age: float = 0.0,
        **values: float,
    ) -> None:
        """Apply one report of a node to the fleet; devices are idle by default."""
        now = self.world.clock.now
        known = [one.info for one in self.world.devices.values() if one.info.node == node]
        infos = devices or tuple(known)
        said = {**IDLE, **{Signal[name]: value for name, value in values.items()}}
        count = len(infos)

        def column(value: float) -> Column:
            return np.full(count, value)

        holders: Mapping[str, Holders | None] = {
            node: None
            if self.pods is None
            else Holders(at=now - holders_age, pods=dict(self.pods), uids=dict(self.uids))
        }
        self.world.fleet.apply_readings(
            Readings(
                source="agent",
                at=now,
                devices=infos,
                columns={signal: column(value) for signal, value in said.items()},
                measured_at=column(now - age),
                tenants=None,
                own=Own(
                    nodes=(node,),
                    news=frozenset({node}),
                    holders=holders,
                    mean=column(NAN if mean is None else mean[0]),
                    mean_square=column(NAN if mean is None else mean[1]),
                    is_foreign=np.full(count, is_foreign),
                    xid_age=column(xid_age),
                    devices=count,
                    replicas={node: dict(self.replicas)} if self.replicas else {},
                    foreign_bytes=None if foreign_bytes is None else column(foreign_bytes),
                ),
            )
        )


def windows(world: World, device: Device) -> tuple[float, float, int]:
    row = world.fleet.store.row_of(device.info.key)
    assert row is not None
    mean, spread, count = summarize(world.fleet.store._columns.windows)
    return float(mean[row]), float(spread[row]), int(count[row])
