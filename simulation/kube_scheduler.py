"""Simulate a kube-scheduler that sends extender requests like the real one and binds pods."""

from dataclasses import dataclass
from typing import Any

import aiohttp

from simulation.control import SimulatedControlPlane
from simulation.default_scheduler import fitting
from simulation.kubelet import pod_ref, requested
from simulation.objects import JsonObject

WEIGHT, POINTS_PER_SCORE = 10, 10


Answer = Any  # an answer of the extender: plain JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Result of scheduling a pod.

    Attributes:
        pod: name of the pod.
        node: node to which it was bound, "" if it is pending.
        refused: the extender's reason by node.
    """

    pod: str
    uid: str
    node: str
    refused: dict[str, str]


class SimulatedScheduler:
    """Schedules one pod at a time: its own resource fit, then the extender's verbs.

    Args:
        url: base URL of the extender.
        session: session for the requests.
    """

    def __init__(
        self, *, url: str, control: SimulatedControlPlane, session: aiohttp.ClientSession
    ) -> None:
        self._url = url
        self._control = control
        self._session = session

    async def schedule(self, pod: JsonObject) -> Placement:
        """Create a pod, call the extender, and bind the pod to the node with the highest score."""
        created = self._control.create_pod(pod)
        ref = pod_ref(created)
        names = fitting(self._control.fleet, requested(created))
        verdict = await self._call("filter", created, names)
        feasible = verdict["NodeNames"]
        node = feasible[0] if feasible else ""
        if len(feasible) > 1:  # kube-scheduler skips prioritize if one node is feasible
            scores = await self._call("prioritize", created, feasible)
            totals = {score["Host"]: score["Score"] * WEIGHT * POINTS_PER_SCORE for score in scores}
            node = max(totals, key=totals.__getitem__)
        if node:
            self._control.bind(ref.namespace, ref.name, node)
        return Placement(
            pod=ref.name,
            uid=ref.uid,
            node=node,
            refused=verdict["FailedNodes"] | verdict["FailedAndUnresolvableNodes"],
        )

    async def _call(self, verb: str, pod: JsonObject, names: list[str]) -> Answer:
        """Call one verb of the extender in the form of `nodeCacheCapable: true`."""
        arguments = {"Pod": pod, "Nodes": None, "NodeNames": names}
        async with self._session.post(f"{self._url}/{verb}", json=arguments) as answer:
            answer.raise_for_status()
            return await answer.json()
