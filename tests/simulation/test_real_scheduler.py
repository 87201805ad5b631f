"""The model of kube-scheduler's default scores, against the real kube-scheduler."""

import random
from collections import Counter

import pytest

from simulation.default_scheduler import DefaultScheduler
from simulation.kubelet import pod_ref
from simulation.nodes import GPU_RESOURCE
from simulation.objects import pod_object
from testkit.controlplane.client import ApiClient
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.scheduler import scheduler_config
from testkit.controlplane.simulated import register_nodes, register_tenants
from tests.simulation import builders

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

SHARES = 32
TENANTS = {"node-a": 14, "node-b": 2, "node-c": 27, "node-d": 0}
"""Running pods; every 13th costs a node a point of its score."""

PODS = 24


async def test_kube_scheduler_binds_to_the_models_best_node(
    cluster: ApiClient, start_scheduler: StartScheduler
) -> None:
    fleet = builders.fleet(*(builders.spec(name, replicas=SHARES // 2) for name in TENANTS))
    for name, count in TENANTS.items():
        for number in range(count):
            fleet.place(builders.pod(f"{name}-{number}"), name, GPU_RESOURCE)
    await register_nodes(cluster, fleet, fleet.nodes)
    await register_tenants(cluster, fleet, age_seconds=60.0)
    await start_scheduler(scheduler_config())
    model = DefaultScheduler(fleet, random.Random(0))
    sizes = Counter[int]()

    for number in range(PODS):
        pod = pod_object(f"new-{number:02}")
        best = model.best(pod)
        await cluster.create(pod)

        node = await cluster.wait_bound(pod)

        assert node in best, (number, best)
        sizes[len(best)] += 1
        fleet.place(pod_ref(pod), node, GPU_RESOURCE)

    assert min(sizes) < len(TENANTS)  # the scores differed: not every node was equally good
