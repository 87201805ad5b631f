"""A simulated kube-scheduler: asks an extender as the real one does, and binds."""

import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from simulation.control import SimulatedControlPlane
from simulation.kubelet import pod_ref, requested
from simulation.objects import JsonObject, child
from simulation.objectstore import Kind

WEIGHT, POINTS_PER_SCORE = 10, 10


Answer = Any  # what the extender answers: plain JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What became of a pod.

    Attributes:
        pod: its name.
        uid: its UID.
        node: where it was bound, "" where it stays pending.
        asked: nodes that passed kube-scheduler's own filters.
        feasible: nodes that passed the extender's filter.
        refused: the extender's reason by node.
        seconds: time that the extender's answers took.
    """

    pod: str
    uid: str
    node: str
    asked: int
    feasible: int
    refused: dict[str, str]
    seconds: float


class SimulatedScheduler:
    """Schedules one pod at a time: its own resource fit first, then the extender's verbs.

    Args:
        url: base URL of the extender.
        control: the simulated API server's state.
        session: for the calls.
    """

    def __init__(
        self, *, url: str, control: SimulatedControlPlane, session: aiohttp.ClientSession
    ) -> None:
        self._url = url
        self._control = control
        self._session = session

    async def schedule(self, pod: JsonObject) -> Placement:
        """Create a pod, ask, and bind it where the sum of scores is highest."""
        created = self._control.create_pod(pod)
        ref = pod_ref(created)
        names = self._fitting(created)
        started = time.perf_counter()
        verdict = await self._ask("filter", created, names)
        feasible = verdict["NodeNames"]
        node = feasible[0] if feasible else ""
        if len(feasible) > 1:  # kube-scheduler does not ask which of one node is best
            scores = await self._ask("prioritize", created, feasible)
            totals = {score["Host"]: score["Score"] * WEIGHT * POINTS_PER_SCORE for score in scores}
            node = max(totals, key=totals.__getitem__)
        seconds = time.perf_counter() - started
        if node:
            self._control.bind(ref.namespace, ref.name, node)
        return Placement(
            pod=ref.name,
            uid=ref.uid,
            node=node,
            asked=len(names),
            feasible=len(feasible),
            refused=verdict["FailedNodes"] | verdict["FailedAndUnresolvableNodes"],
            seconds=seconds,
        )

    def _fitting(self, pod: JsonObject) -> list[str]:
        """Return the nodes with enough unclaimed devices, as kube-scheduler's NodeResourcesFit."""
        fleet = self._control.fleet
        wanted = requested(pod)
        held: dict[tuple[str, str], int] = {}
        for other in self._control.store.items[Kind.PODS].values():
            node = str(child(other, "spec").get("nodeName") or "")
            if node and child(other, "status").get("phase") not in {"Succeeded", "Failed"}:
                for resource, count in requested(other).items():
                    held[node, resource] = held.get((node, resource), 0) + count
        return [
            name
            for name, node in fleet.nodes.items()
            if all(
                node.count(resource, is_allocatable=True) - held.get((name, resource), 0) >= count
                for resource, count in wanted.items()
            )
        ]

    async def _ask(self, verb: str, pod: JsonObject, names: list[str]) -> Answer:
        """Ask one verb in the form of nodeCacheCapable: true."""
        question = {"Pod": pod, "Nodes": None, "NodeNames": names}
        async with self._session.post(f"{self._url}/{verb}", json=question) as answer:
            answer.raise_for_status()
            return await answer.json()
