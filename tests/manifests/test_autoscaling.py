"""Placeholder pods that keep GPU nodes warm, by schedule and by demand, on a real control plane."""

from math import ceil
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import yaml
from prometheus_client import CollectorRegistry
from yarl import URL

from extender.api.status_routes import FleetCollector
from extender.core.devices.gpu_models import _NAMES
from testkit.builders import GPU
from testkit.cards import IDLE
from testkit.controlplane.controllers import kube_controller_manager
from testkit.controlplane.monitoring import EXTENDER_JOB
from testkit.controlplane.objects import Object, pod
from testkit.controlplane.shipped import EXAMPLES, address_of, find
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World as ClusterWorld
from testkit.world import SHARED, World
from tests.manifests.metrics_adapter import external_metrics, query_of
from tests.manifests.scraping import fetch, prometheus, serving

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(180)]

FOLDER: Final = EXAMPLES / "autoscaling"
NAMESPACE: Final = "gpu-warm"
AUTOSCALING: Final = (
    "deployment-controller",
    "garbage-collector-controller",
    "horizontal-pod-autoscaler-controller",
    "replicaset-controller",
    "serviceaccount-controller",
)
CLOCK: Final = f"--as=system:serviceaccount:{NAMESPACE}:clock"


def objects(name: str) -> list[Object]:
    text = (FOLDER / f"{name}.yaml").read_text()
    return [item for item in yaml.safe_load_all(text) if item]


def scale_arguments(name: str) -> list[str]:
    """Return the kubectl arguments of a CronJob."""
    job = find(objects("by-clock"), "CronJob", name)["spec"]["jobTemplate"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found


# --- on a real control plane ----------------------------------------------------------------------


async def placeholders(world: ClusterWorld) -> dict[str, str]:
    """Return the nodes of the placeholders by pod, "" for a waiting one."""
    return {
        item["metadata"]["name"]: item["spec"].get("nodeName", "")
        for item in await world.client.list_pods(NAMESPACE)
    }


async def placed(world: ClusterWorld, nodes: set[str]) -> dict[str, str]:
    """Wait until exactly these nodes have a placeholder."""

    async def are_there() -> dict[str, str] | None:
        found = await placeholders(world)
        return found if {node for node in found.values() if node} == nodes else None

    return await wait_for(are_there, f"placeholders on {sorted(nodes)}")


async def scale_by_clock(world: ClusterWorld, name: str) -> None:
    """Scale as a CronJob does, once its rights are in force."""

    async def is_allowed() -> bool:
        try:
            await world.services.plane.kubectl(CLOCK, *scale_arguments(name))
        except RuntimeError as error:
            if "forbidden" not in str(error):
                raise
            return False
        return True

    await wait_for(is_allowed, f"the {name}'s CronJob may scale")


async def remove(world: ClusterWorld, *names: str) -> None:
    for name in names:
        for item in objects(name):
            if item["kind"] != "Namespace":
                await world.client.request(
                    "DELETE", address_of(item), parameters={"propagationPolicy": "Background"}
                )
    await none_left(world)


async def none_left(world: ClusterWorld) -> None:
    """Wait until there is no placeholder."""

    async def is_empty() -> bool:
        return not await placeholders(world)

    await wait_for(is_empty, "no placeholder is left")


async def test_a_real_pod_takes_a_placeholders_node_and_the_clock_scales_them(
    world: ClusterWorld,
) -> None:
    one, two = world.add("one", 8), world.add("two", 8)
    await world.start()
    plane = world.services.plane
    controllers = kube_controller_manager(plane)
    await controllers.start()
    try:
        for name in ("placeholders", "by-clock"):
            path = str(FOLDER / f"{name}.yaml")
            await plane.kubectl("apply", "--server-side", "--validate=strict", "-f", path)
        await scale_by_clock(world, "morning")
        warm = await placed(world, {one, two})

        urgent = pod("urgent", 8)
        node = await world.place(urgent)

        assert node in {one, two}
        await placed(world, {one, two} - {node})

        async def is_recreated() -> bool:
            return bool((await placeholders(world)).keys() - warm.keys())

        # The recreated placeholder waits for a node: an autoscaler would add one.
        await wait_for(is_recreated, "the preempted placeholder is recreated")
        requested = await world.decisions(urgent)
        assert requested, "idlegpu got no request"
        await scale_by_clock(world, "evening")
        await none_left(world)
        with pytest.raises(RuntimeError, match="forbidden"):
            await plane.kubectl(CLOCK, "-n", NAMESPACE, "get", "pods")
    finally:
        await remove(world, "by-clock", "placeholders")
        await controllers.stop()


@pytest.mark.timeout(300)
async def test_autoscaler_adds_and_removes_a_placeholder_for_waiting_pods(
    world: ClusterWorld, tmp_path: Path
) -> None:
    one = world.add("one", 8)
    await world.start()
    plane = world.services.plane
    controllers = kube_controller_manager(
        plane, AUTOSCALING, options=["--horizontal-pod-autoscaler-sync-period=1s"]
    )
    process, url = prometheus(tmp_path, {EXTENDER_JOB: URL(world.services.extender.url).authority})
    await process.start()
    try:
        async with external_metrics(plane, tmp_path, rules(), url):
            await controllers.start()
            for name in ("placeholders", "by-demand"):
                path = str(FOLDER / f"{name}.yaml")
                await plane.kubectl("apply", "--server-side", "--validate=strict", "-f", path)
            await placed(world, {one})
            # One of them takes the placeholder's node, so the other one waits.
            await world.client.create_all([pod("first", 8), pod("second", 8)])
            await scaled_to(world, 2)

            # The shipped value would delay scaling down by two minutes.
            quick = '{"spec":{"behavior":{"scaleDown":{"stabilizationWindowSeconds":0}}}}'
            await plane.kubectl(
                "patch", "hpa", "placeholder", "-n", NAMESPACE, "--type=merge", "-p", quick
            )
            for name in ("first", "second"):
                await world.client.delete(pod(name))
            await scaled_to(world, 1)
            await placed(world, {one})
    finally:
        await remove(world, "by-demand", "placeholders")
        await controllers.stop()
        await process.stop()


async def scaled_to(world: ClusterWorld, replicas: int) -> None:
    """Wait until the autoscaler wants `replicas` placeholders, they exist, and it is stable.

    Raises:
        TimeoutError: it does not in time; the message has its last status.
    """
    (item,) = objects("by-demand")
    last: Object = {}

    async def is_scaled() -> bool:
        nonlocal last
        last = (await world.client.request("GET", address_of(item))).get("status", {})
        # Without a value, before the first scrape, its status has no metric.
        external = [one.get("external", {}) for one in last.get("currentMetrics") or ()]
        found = [one.get("current", {}).get("averageValue") for one in external]
        wanted = last.get("desiredReplicas")
        # The GPUs that pods wait for plus one node, divided by the GPUs of a placeholder.
        return found == ["8"] and wanted == replicas == len(await placeholders(world))

    try:
        await wait_for(is_scaled, f"{replicas} placeholders", deadline_seconds=90)
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {last}") from error


# --- the metric -----------------------------------------------------------------------------------


def extender_of(*waiting: tuple[int, str, bool]) -> CollectorRegistry:
    """Return the metrics of a replica of the extender while pods wait.

    Args:
        *waiting: GPUs, requested model, and whether it is a placeholder, for each pod.
    """
    world = World()
    world.add({"idle": [IDLE, IDLE]})
    for number, (gpus, model, gives_way) in enumerate(waiting):
        world.add_waiting(
            f"pod-{number}",
            resources={GPU: gpus, SHARED: 1},  # requests for shared GPUs do not count
            is_unscheduled=True,
            wanted_model=model,
            gives_way=gives_way,
        )
    world.metrics.registry.register(
        FleetCollector(world.fleet, tuple, lambda: 0, lambda: world.now)
    )
    return world.metrics.registry


def rules() -> list[Object]:
    """Return the rules of the example's adapter."""
    (config,) = objects("prometheus-adapter")
    found: list[Object] = yaml.safe_load(config["data"]["config.yaml"])["externalRules"]
    return found


def metric_query(**more: str) -> str:
    """Return prometheus-adapter's query for the autoscaler's metric, with further labels."""
    (rule,) = rules()
    (metric,) = find(objects("by-demand"), "HorizontalPodAutoscaler", "placeholder")["spec"][
        "metrics"
    ]
    wanted = metric["external"]["metric"]
    assert rule["name"]["as"] == wanted["name"]
    return query_of(rule, ",".join(f'{name}="{value}"' for name, value in more.items()))


def replicas_for(metric: Object) -> int:
    """Return the replicas by Kubernetes' rule for an AverageValue of an external metric."""
    (wanted,) = objects("by-demand")[0]["spec"]["metrics"]
    return ceil(float(metric["value"][1]) / int(wanted["external"]["target"]["averageValue"]))


async def test_query_counts_awaited_gpus_once_for_all_replicas(tmp_path: Path) -> None:
    pods = ((8, "h100", False), (2, "", False), (8, "", True))
    async with (
        serving(extender_of(*pods)) as first,
        serving(extender_of(*pods)) as second,
        aiohttp.ClientSession() as session,
    ):
        process, url = prometheus(tmp_path, {EXTENDER_JOB: first, "another-replica": second})
        await process.start()
        try:

            async def both_are_counted() -> list[Object]:
                # In one round, because one late scrape would hide its replica's metrics.
                queries = (metric_query(), metric_query(model="h100"))
                found = [item for query in queries for item in await fetch(session, url, query)]
                scraped = await fetch(session, url, "up == 1")
                return found if len(scraped) == len(found) == len(queries) else []

            every, h100 = await wait_for(both_are_counted, "both replicas are scraped")
        finally:
            await process.stop()

    assert every["value"][1] == "18"
    assert h100["value"][1] == "16"
    assert (replicas_for(every), replicas_for(h100)) == (2 + 1, 1 + 1)


async def test_one_node_is_kept_warm_while_no_pod_waits(tmp_path: Path) -> None:
    async with serving(extender_of()) as extender, aiohttp.ClientSession() as session:
        process, url = prometheus(tmp_path, {EXTENDER_JOB: extender})
        await process.start()
        try:

            async def is_known() -> list[Object]:
                return await fetch(session, url, metric_query())

            (found,) = await wait_for(is_known, "the metric is scraped")
        finally:
            await process.stop()

    assert found["value"][1] == "8"
    assert replicas_for(found) == 1


# --- the files ------------------------------------------------------------------------------------


def test_placeholders_give_way_to_any_pod_and_still_bring_nodes() -> None:
    items = objects("placeholders")
    priority = find(items, "PriorityClass", "gpu-placeholder")
    spec = find(items, "Deployment", "placeholder")["spec"]["template"]["spec"]

    # Cluster Autoscaler adds no nodes for priorities below -10; the default is 0.
    assert -10 <= priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    assert spec["priorityClassName"] == "gpu-placeholder"
    assert spec["terminationGracePeriodSeconds"] == 0


def test_clock_and_demand_scale_the_placeholders_that_there_are() -> None:
    deployment = find(objects("placeholders"), "Deployment", "placeholder")
    target = objects("by-demand")[0]["spec"]["scaleTargetRef"]
    role = find(objects("by-clock"), "Role", "clock")
    gpus = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][GPU]
    (metric,) = objects("by-demand")[0]["spec"]["metrics"]

    assert (target["kind"], target["name"]) == ("Deployment", "placeholder")
    assert int(metric["external"]["target"]["averageValue"]) == gpus
    assert {name for rule in role["rules"] for name in rule["resourceNames"]} == {"placeholder"}
    for name in ("morning", "evening"):
        assert "deployment/placeholder" in scale_arguments(name)
        assert f"--namespace={NAMESPACE}" in scale_arguments(name)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_file_has_a_header_and_is_named_in_the_guide(path: Path) -> None:
    guide = (EXAMPLES.parents[1] / "docs" / "advice.md").read_text()

    assert path.read_text().startswith("# ")
    assert f"`{path.name}`" in guide


def test_the_guide_names_every_metric_and_every_model() -> None:
    guide = (EXAMPLES.parents[1] / "docs" / "advice.md").read_text()

    for name in ("waiting_pods", "waiting_gpus", "pool_gpus", "pool_idle_gpus"):
        assert f"idlegpu_{name}" in guide
    assert {name for name in _NAMES if f"`{name}`" not in guide} == set()
