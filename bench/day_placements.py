"""Place the pods of a simulated day: kube-scheduler's default scores, alone and with idlegpu.

With idlegpu, the answers of its own filter and prioritize count as kube-scheduler counts them:
nodes that filter refuses drop out, and the score on the wire is added ten times.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench.day_pods import NODES, SHARED, SHARED_GPU, WHOLE
from bench.day_run import FleetDay
from bench.sharing import Blind
from bench.sharing_day import NO_POD, Day
from bench.traces import Floats
from bench.virtual_cluster import GPU, NAMESPACE, START, VirtualCluster
from extender.core.devices.readings import Signal
from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodRecord
from extender.core.policy import Policy
from extender.core.request.gpu_resources import ResourceNames
from extender.placement.request_log import RequestLog
from extender.runtime.metrics import Metrics
from extender.settings.service import Wire
from extender.sources.kubernetes.records import reduce_pod
from extender.webhook.handlers import Webhooks
from simulation.default_scheduler import default_scores

POINTS_PER_SCORE: Final = 10
"""kube-scheduler's points for one point of an extender's score, with the shipped weight of 1."""

READING_STEPS: Final = 4
"""Steps between two readings of all GPUs; they arrive a step after they were measured."""

NAMES: Final = ResourceNames()


Answer = Any  # of the extender: plain JSON


def points(day: FleetDay, pod: int, nodes: Sequence[int]) -> Floats:
    """Return kube-scheduler's own scores of nodes for a pod."""
    return default_scores(*day.shares(nodes, pod), *day.shares(nodes))


class KubeScheduler(Blind):
    """Policy that chooses the node with the highest score; ties are random.

    Args:
        seed: seed of the draws among equal nodes.
    """

    def __init__(self, seed: int) -> None:
        self._draws = np.random.default_rng([seed, 4])

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        """Choose by kube-scheduler's own scores."""
        assert isinstance(day, FleetDay)
        return self.highest(nodes, points(day, pod, nodes))

    def close(self) -> None:
        """Release the policy's resources."""

    def highest(self, nodes: Sequence[int], scores: Floats) -> int:
        """Return a random node of those with the highest score."""
        return int(self._draws.choice(np.asarray(nodes)[scores == scores.max()]))


class WithIdlegpu(KubeScheduler):
    """Policy that calls idlegpu's webhooks, with a real fleet of the day's pods and readings.

    Args:
        seed: seed of the draws among equal nodes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.cluster = VirtualCluster(WHOLE, Policy(), also=[SHARED])
        self._webhooks = Webhooks(
            placer=self.cluster.placer,
            resources=lambda: NAMES,
            metrics=Metrics(),
            max_score=Wire().max_score,
            shortlist=Wire().shortlist,
            is_ready=lambda: True,
            warn_annotation=lambda _, __: None,
            request_log=RequestLog(self.cluster.fleet, clock=self._clock, monotonic=self._clock),
        )
        self._loop = asyncio.new_event_loop()
        self._waiting: dict[str, tuple[PodRecord, Mapping[str, Any]]] = {}
        self._requested = np.zeros((NODES, 2), dtype=np.intp)
        self._measured: dict[Signal, Floats] = {}
        self._measured_at = START
        self._tenants: dict[int, tuple[str, ...]] = {}

    def _clock(self) -> float:
        return self.cluster.now

    @override
    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        """Call filter and prioritize, and add kube-scheduler's own scores."""
        assert isinstance(day, FleetDay)
        self._show_host(day)
        _, raw = self._seen(day, pod)
        names = [self.cluster.names[node] for node in nodes]
        verdict = self._call("filter", raw, names)
        passed = [self.cluster.numbers[name] for name in verdict["NodeNames"] or []]
        if len(passed) < 2:  # kube-scheduler does not call prioritize then
            return passed[0] if passed else None
        given = self._call("prioritize", raw, verdict["NodeNames"])
        by_name = {score["Host"]: score["Score"] for score in given}
        wire = [by_name[self.cluster.names[node]] * POINTS_PER_SCORE for node in passed]
        return self.highest(passed, points(day, pod, passed) + np.array(wire))

    def _seen(self, day: FleetDay, pod: int) -> tuple[PodRecord, Mapping[str, Any]]:
        """Return a waiting pod's record and object, and report the pod as the watch would."""
        name = f"pod-{pod}-{day.tries[pod] + 1}"
        if name not in self._waiting:
            raw = pod_object(day, pod, name)
            record = reduce_pod(raw, NAMES, early_seconds=0.0)
            assert record is not None
            self.cluster.fleet.apply_pod(record)
            self._waiting[name] = record, raw
        return self._waiting[name]

    def _call(self, verb: str, raw: Mapping[str, object], names: Sequence[str]) -> Answer:
        """Send a request as kube-scheduler does with `nodeCacheCapable: true`."""
        handler = self._webhooks.filter if verb == "filter" else self._webhooks.prioritize
        body = orjson.dumps({"Pod": raw, "Nodes": None, "NodeNames": names})
        _, answer = self._loop.run_until_complete(handler(body))
        assert isinstance(answer.body, bytes)
        return orjson.loads(answer.body)

    def _show_host(self, day: FleetDay) -> None:
        """Report the CPU and memory that each node's pods request, as the watch would."""
        requested = np.stack([day.millicores, day.host_bytes], axis=1)
        for node in np.flatnonzero((requested != self._requested).any(axis=1)).tolist():
            millicores, memory = requested[node].tolist()
            self.cluster.fleet.apply_host_use(
                self.cluster.names[node], HostResources(millicores, memory)
            )
        self._requested = requested

    @override
    def start(self, day: Day, pod: int, node: int) -> None:
        """Report a bound pod to the fleet, as the watch would."""
        record, _ = self._waiting.pop(day.name_of(pod))
        self.cluster.bind_known(record, node)

    @override
    def end(self, day: Day, pod: int, *, is_failed: bool) -> None:
        """Report an ended pod to the fleet, as the watch would."""
        self.cluster.end(day.name_of(pod), is_failed=is_failed)

    @override
    def step(self, day: Day) -> None:
        """Measure all GPUs once a minute; the readings arrive one step later."""
        assert isinstance(day, FleetDay)
        self.cluster.now = START + day.seconds
        if day.at % READING_STEPS == 0:
            self._measured = self._measure(day)
            self._measured_at = self.cluster.now
            self._tenants = {
                card: tuple(day.name_of(pod) for pod in pods if pod != NO_POD)
                for card, pods in enumerate(day.slots.tolist())
            }
        elif day.at % READING_STEPS == 1:
            measured_at = np.full(day.shape.devices, self._measured_at)
            self.cluster.read(self._measured, measured_at, self._tenants)

    def _measure(self, day: FleetDay) -> dict[Signal, Floats]:
        """Return the current signals of all GPUs."""
        broken = day.broken[day.at].astype(np.float64)
        return {
            Signal.GPU_UTILIZATION: day.utilization.copy(),
            Signal.MEMORY_USED: day.memory_bytes.copy(),
            Signal.MEMORY_FREE: day.shape.memory_bytes - day.memory_bytes,
            Signal.ROW_REMAP_FAILURE: broken,
        }


def pod_object(day: FleetDay, pod: int, name: str) -> dict[str, Any]:
    """Build the Pod object of one of the day's waiting pods."""
    kind, _, owner = day.fleet_pods.owner[pod].partition(" ")
    resource = GPU if day.fleet_pods.is_whole[pod] else SHARED_GPU
    gpus = {resource: str(day.fleet_pods.gpus[pod])}
    host = {
        "cpu": f"{day.fleet_pods.millicores[pod]}m",
        "memory": str(day.fleet_pods.host_bytes[pod]),
    }
    return {
        "metadata": {
            "uid": f"uid-{name}",
            "namespace": NAMESPACE,
            "name": name,
            "ownerReferences": [{"kind": kind, "name": owner, "uid": owner, "controller": True}],
        },
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": gpus, "requests": host | gpus}}]
        },
        "status": {"phase": "Pending"},
    }
