"""The day's model of kube-scheduler's scores, compared with the real kube-scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
from typing_extensions import override  # `override` is in `typing` from Python 3.12 on

from bench.day_placements import KubeScheduler, pod_object, points
from bench.day_pods import CARDS, HOST, SHARED, SHARED_GPU
from bench.day_run import FleetDay
from bench.sharing_day import Day
from bench.virtual_cluster import GPU
from testkit.controlplane.client import ApiClient
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.objects import IMAGE, Object, node
from testkit.controlplane.scheduler import scheduler_config

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EVERY: Final = 53
SAMPLE: Final = 24
LABEL: Final = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRequest:
    """Scheduling decision of the day.

    Attributes:
        pod: resources in the pod's object.
        requested: requested millicores and bytes of memory of other pods, and used GPUs, by node.
        best: nodes with the highest score of the model.
        resource: the GPU resource.
    """

    pod: dict[str, Any]
    requested: dict[int, tuple[int, int, int]]
    best: tuple[int, ...]
    resource: str


class Sampling(KubeScheduler):
    """Policy of the model that samples decisions in which the nodes' scores differ."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.sample: list[SampledRequest] = []
        self._count = 0

    @override
    def choose(self, day: Day, pod: int, nodes: Sequence[int]) -> int | None:
        assert isinstance(day, FleetDay)
        scores = points(day, pod, nodes)
        best = tuple(at for at, score in zip(nodes, scores, strict=True) if score == scores.max())
        self._count += len(best) < len(nodes)
        if len(best) < len(nodes) and self._count % EVERY == 0 and len(self.sample) < SAMPLE:
            used = day.used_by_node()
            raw = pod_object(day, pod, "any")
            self.sample.append(
                SampledRequest(
                    pod=raw["spec"]["containers"][0]["resources"],
                    requested={
                        at: (int(day.millicores[at]), int(day.host_bytes[at]), int(used[at]))
                        for at in nodes
                    },
                    best=best,
                    resource=GPU if day.fleet_pods.is_whole[pod] else SHARED_GPU,
                )
            )
        return super().choose(day, pod, nodes)


def described(number: int, request: SampledRequest) -> tuple[list[Object], list[Object], Object]:
    """Return the nodes of a decision, one pod on each with the requests of all its pods, and the
    pod.
    """
    label = {LABEL: str(number)}
    offered = CARDS * (1 if request.resource == GPU else SHARED.replicas)
    nodes, pods = [], []
    for at, (millicores, memory, used) in request.requested.items():
        name = f"request-{number}-{at}"
        item: Any = node(name, {request.resource: offered}, labels=label)
        host = {"cpu": f"{HOST.millicores}m", "memory": str(HOST.memory_bytes)}
        item["status"]["capacity"] |= host
        nodes.append(item)
        if used:
            gpus = {request.resource: str(used)}
            host = {"cpu": f"{millicores}m", "memory": str(memory)}
            resources = {"limits": gpus, "requests": host | gpus}
            pods.append(_pod(f"there-{number}-{at}", resources, nodeName=name))
    return nodes, pods, _pod(f"asks-{number}", request.pod, nodeSelector=label)


def _pod(name: str, resources: Object, **spec: object) -> Object:
    container = {"name": "main", "image": IMAGE, "resources": resources}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0, **spec},
    }


async def test_kube_scheduler_chooses_as_the_model_of_the_day(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    sampling = Sampling(1)
    FleetDay(1).run(sampling)
    items = [described(number, request) for number, request in enumerate(sampling.sample)]
    await cluster.create_all(node for nodes, _, _ in items for node in nodes)
    await cluster.create_all(pod for _, pods, _ in items for pod in pods)
    await start_scheduler(scheduler_config())

    differs = {}
    for number, ((_, _, pod), request) in enumerate(zip(items, sampling.sample, strict=True)):
        await cluster.create(pod)
        chosen = int((await cluster.wait_bound(pod)).rpartition("-")[2])
        if chosen not in request.best:
            differs[number] = (chosen, request)

    assert len(items) == SAMPLE
    assert {request.resource for request in sampling.sample} == {GPU, SHARED_GPU}
    assert differs == {}
