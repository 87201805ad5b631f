"""The main cases on the oldest Kubernetes, imported from their own modules."""

import contextlib
from pathlib import Path

import pytest
import yaml

from testkit.controlplane.client import ApiError
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object
from testkit.controlplane.services import Services
from testkit.controlplane.shipped import (
    COMPONENTS,
    EXAMPLES,
    SECOND_SCHEDULER,
    address_of,
    with_components,
)
from testkit.controlplane.tools import OLDEST_KUBERNETES_VERSION
from testkit.controlplane.world import World
from tests.e2e.test_bursts import test_a_burst_spreads_evenly_although_no_metric_moves
from tests.e2e.test_idleness import (
    test_a_pod_that_requires_idle_gpus_waits_for_them,
    test_an_idle_node_beats_a_busy_one,
    test_whole_nodes_on_the_wire_lead_to_the_same_node,
)
from tests.e2e.test_preemption import (
    test_a_preemptor_gets_its_node_while_metrics_still_show_its_victims,
    test_no_pod_is_evicted_for_load,
)
from tests.e2e.waking import make_idle, refused, start
from tests.manifests.variants import EVERY_COMPONENT, VARIANTS

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

__all__ = [
    "test_a_burst_spreads_evenly_although_no_metric_moves",
    "test_a_pod_that_requires_idle_gpus_waits_for_them",
    "test_a_preemptor_gets_its_node_while_metrics_still_show_its_victims",
    "test_an_idle_node_beats_a_busy_one",
    "test_no_pod_is_evicted_for_load",
    "test_whole_nodes_on_the_wire_lead_to_the_same_node",
]


async def test_oldest_tested_version_is_running(world: World) -> None:
    version = await world.client.request("GET", "/version")

    assert version["gitVersion"] == OLDEST_KUBERNETES_VERSION


async def test_a_waiting_pod_is_woken_without_a_right_on_nodes(world: World) -> None:
    node = await start(world)
    patient = await refused(world)

    await make_idle(world, node)

    assert await world.bound([patient]) == [node]


@pytest.fixture(params=[*VARIANTS, COMPONENTS], ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of each variant, and of an overlay with all components."""
    if request.param != COMPONENTS:
        return Path(request.param)
    return with_components(tmp_path, EVERY_COMPONENT)


async def test_the_manifests_are_taken_with_every_field(
    world: World, services: Services, folder: Path
) -> None:
    installation = Installation(services.plane, world.client)
    await installation.add_kinds_of_others()
    items = [*await installation.apply(folder), *await installation.apply(SECOND_SCHEDULER)]
    for item in items:
        assert await world.client.request("GET", address_of(item))

    await installation.remove()

    for item in items:
        if item["kind"] != "Namespace":
            with pytest.raises(ApiError, match="not found"):
                await world.client.request("GET", address_of(item))


def examples() -> list[Object]:
    """Return the objects of all examples."""
    texts = (path.read_text() for path in EXAMPLES.rglob("*.yaml"))
    return [item for text in texts for item in yaml.safe_load_all(text) if item]


async def test_the_examples_are_taken_with_every_field(world: World, services: Services) -> None:
    options = ("--server-side", "--dry-run=server", "--validate=strict")
    # The API server validates namespaced objects only if the namespace exists.
    for name in {item["metadata"].get("namespace", "default") for item in examples()}:
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        with contextlib.suppress(ApiError):  # it exists already
            await world.client.create(namespace)

    taken = await services.plane.kubectl("apply", *options, "-R", "-f", str(EXAMPLES))

    assert len(taken.splitlines()) == len(examples())
