"""Pods that wait until a GPU is idle."""

import time
from datetime import datetime
from typing import Any, Final

from simulation.devices import Load
from simulation.models import GIB
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

FOREIGN: Final = Load(utilization=0.85, memory_bytes=30 * GIB)
PATIENT: Final = {"idlegpu.io/require-idle": "true"}


async def make_busy(world: World, node: str) -> None:
    """Start a foreign process, and wait until the extender knows."""
    world.fleet.set_foreign(node, 0, FOREIGN)
    await world.wait_state(node, 0, "foreign")


async def make_idle(world: World, node: str) -> None:
    """End the foreign process, and wait until the extender knows."""
    world.fleet.set_foreign(node, 0, None)
    await world.wait_state(node, 0, "idle")


async def refused(world: World, name: str = "patient", **spec: Any) -> Object:
    """Create a pod that is refused, and wait until its back-off in kube-scheduler is over."""
    patient = pod(name, annotations=PATIENT, **spec)
    await world.client.create(patient)
    assert "node(s) had" in await world.client.wait_unschedulable(patient)
    await world.decided(patient, more_than=0)
    longest_backoff_seconds = 1.0

    async def is_backed_off() -> bool:
        latest = (await world.decisions(patient))[0]
        return time.time() - _seconds(latest["at"]) > longest_backoff_seconds

    await wait_for(is_backed_off, "the pod's back-off is over")
    return patient


def _seconds(at: str) -> float:
    return datetime.fromisoformat(at).timestamp()


async def start(world: World, **wake: Any) -> str:
    """Start with one node of one GPU that a process outside Kubernetes uses."""
    node = world.add("only", cards=1)
    await world.start({"wake": wake})
    await make_busy(world, node)
    return node
