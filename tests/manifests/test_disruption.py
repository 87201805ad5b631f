"""Drains and upgrades of nodes never remove the last ready replica."""

from functools import partial
from typing import Final

import pytest
import pytest_asyncio

from testkit.controlplane.client import ApiError
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object, node
from testkit.controlplane.process import ServerProcess
from testkit.controlplane.scheduler import scheduler_config
from testkit.controlplane.shipped import EXTENDER_NAMESPACE, MANIFESTS
from testkit.controlplane.waiting import wait_for

pytestmark = [
    pytest.mark.neighbours,
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("controllers"),  # creates and counts the pods
]

NAME: Final = "idlegpu-extender"
PODS: Final = f"/api/v1/namespaces/{EXTENDER_NAMESPACE}/pods"
BUDGET: Final = f"/apis/policy/v1/namespaces/{EXTENDER_NAMESPACE}/poddisruptionbudgets/{NAME}"
TOO_MANY_REQUESTS: Final = 429


async def replicas(installation: Installation) -> list[Object]:
    """Return the extender's pods, sorted by name."""
    found = [
        pod
        for pod in await installation.admin.list_pods(EXTENDER_NAMESPACE)
        if pod["metadata"]["labels"]["app.kubernetes.io/name"] == NAME
    ]
    return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))


async def set_ready(installation: Installation, pod: Object, *, is_ready: bool) -> None:
    """Set the readiness of a pod as its kubelet would."""
    condition = {"type": "Ready", "status": str(is_ready)}
    await installation.admin.patch(
        {"kind": "Pod", **pod}, {"status": {"conditions": [condition]}}, "status"
    )


async def budget_allows(installation: Installation, count: int) -> bool:
    status = (await installation.admin.request("GET", BUDGET)).get("status", {})
    return (status.get("disruptionsAllowed"), status.get("expectedPods")) == (count, 2)


async def evict(installation: Installation, pod: Object) -> int:
    """Request an eviction as a drain does; return the API server's answer."""
    metadata = {name: pod["metadata"][name] for name in ("name", "namespace")}
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    try:
        await installation.admin.request("POST", f"{PODS}/{metadata['name']}/eviction", eviction)
    except ApiError as error:
        return error.status
    return 201


@pytest_asyncio.fixture
async def both(
    installation: Installation, kubelets: ServerProcess, start_scheduler: StartScheduler
) -> list[Object]:
    """Return the extender's two pods, both ready; the test changes their readiness."""
    await start_scheduler(scheduler_config())
    await installation.admin.create_all([node("a", 0), node("b", 0)])
    await installation.apply(MANIFESTS)
    await wait_for(partial(budget_allows, installation, 1), "both replicas are ready")
    await kubelets.stop()
    return await replicas(installation)


async def test_the_second_replica_is_not_evicted_while_the_first_is_not_ready(
    installation: Installation, both: list[Object]
) -> None:
    first, second = both

    await set_ready(installation, first, is_ready=False)
    await wait_for(partial(budget_allows, installation, 0), "one replica is not ready")

    assert await evict(installation, second) == TOO_MANY_REQUESTS

    await set_ready(installation, first, is_ready=True)
    await wait_for(partial(budget_allows, installation, 1), "both replicas are ready again")

    assert await evict(installation, second) == 201
    assert await evict(installation, first) == TOO_MANY_REQUESTS


async def test_disruption_budget_lets_unready_replicas_go(
    installation: Installation, both: list[Object]
) -> None:
    first, _ = both

    await set_ready(installation, first, is_ready=False)
    await wait_for(partial(budget_allows, installation, 0), "one replica is not ready")

    assert await evict(installation, first) == 201
