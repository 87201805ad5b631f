"""Continuous creation of pods while faults are injected."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import aiohttp

from testkit.controlplane.client import ApiError
from testkit.controlplane.kubelets import ENDS_AFTER
from testkit.controlplane.objects import pod
from testkit.controlplane.world import World

BETWEEN_PODS_SECONDS: Final = 0.25
POD_SECONDS: Final = "3s"
POLL_SECONDS: Final = 0.2
UNREACHABLE: Final = (aiohttp.ClientError, ApiError, OSError, TimeoutError)


@dataclass(slots=True, kw_only=True)
class PodLoad:
    """Continuous load of short pods.

    Attributes:
        world: cluster in which the pods are created.
        created: time of creation by name of the pod.
        nodes: node of each pod that the watch reported as bound.
    """

    world: World
    created: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=count)

    async def create(self) -> str:
        """Create a pod; retry until the API server accepts it."""
        name = f"pod-{next(self._numbers)}"
        item = pod(name, annotations={ENDS_AFTER: POD_SECONDS})
        while True:
            try:
                await self.world.client.create(item)
            except ApiError as error:
                if error.status == 409:  # an earlier attempt succeeded, but its answer was lost
                    break
                await asyncio.sleep(POLL_SECONDS)
            except UNREACHABLE:
                await asyncio.sleep(POLL_SECONDS)
            else:
                break
        self.created[name] = time.monotonic()
        return name

    async def go_on(self) -> None:
        """Create pods until cancelled."""
        while True:
            await self.create()
            await asyncio.sleep(BETWEEN_PODS_SECONDS)

    async def watch(self) -> None:
        """Record the pods' nodes and delete ended pods, until cancelled."""
        while True:
            with suppress(*UNREACHABLE):
                await self._look()
            await asyncio.sleep(POLL_SECONDS)

    async def _look(self) -> None:
        for item in await self.world.client.list_pods():
            name, node = item["metadata"]["name"], item["spec"].get("nodeName")
            if name in self.created and node:
                self.nodes[name] = node
                if item["status"].get("phase") in {"Succeeded", "Failed"}:
                    await self.world.client.delete({"kind": "Pod", **item})

    def waiting(self, before: float) -> list[str]:
        """Return the pods that were created before a time and are not bound."""
        return [name for name, at in self.created.items() if at < before and name not in self.nodes]
