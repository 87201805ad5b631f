"""Placement of each example by the real kube-scheduler with the real extender."""

import contextlib
import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from extender.core.request.annotations import PREFIX
from extender.sources.prometheus.dcgm import DEFAULT_METRICS
from simulation.models import A10, A100_40GB, A100_80GB, H100, L40S, T4, V100
from simulation.nodes import EXPORTER_4_8, Sharing
from testkit.controlplane.client import ApiError
from testkit.controlplane.controllers import kube_controller_manager
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object, node
from testkit.controlplane.shipped import EXAMPLES, address_of
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World

pytestmark = pytest.mark.timeout(180)

FILES: Final = sorted(EXAMPLES.glob("*.yaml"))
SETTINGS: Final = sorted((EXAMPLES / "settings").glob("*.yaml"))
FIRST: Final = (
    "gpus-8",
    "gpus-4-a100",
    "gpu-v100",
    "gpu-by-instance-type",
    "gpu-a100",
    "gpu-by-label",
    "gpu-by-model",
)
"""Applied first: these need many GPUs or a certain model, which the others would take."""

A100: Final = {"a100-40", "a100-80"}
WHOLE: Final = A100 | {"v100", "h100-a", "h100-b"}
SHARED: Final = {"sliced", "mps"}
EXPECTED: Final = {
    "deployment-over-shares": SHARED,
    "function-runtime": WHOLE,
    "gpu-a100": A100,
    "gpu-by-instance-type": {"v100", "a100-40"},
    "gpu-by-label": A100 | {"v100"},
    "gpu-by-model": A100,
    "gpu-by-preference": WHOLE,  # among equal nodes the affinity decides: see below
    "gpu-packed": WHOLE,
    "gpu-really-idle": WHOLE,
    "gpu-spot": {"spot"},
    "gpu-tainted": {"tainted"},
    "gpu-v100": {"v100"},
    "gpu-with-cache": WHOLE,
    "gpus-2": WHOLE,
    "gpus-4-a100": A100,
    "gpus-8": WHOLE - {"v100"},
    "mig-mixed": {"mig"},
    "mig-single": {"single"},
    "model-server": WHOLE,
    "share-by-plain-name": {"plain"},
    "share-mps": {"mps"},
    "share-onnx": SHARED,
    "share-pytorch": SHARED,
    "share-tensorflow": SHARED,
    "smoke": WHOLE | {"tainted"},
}
"""Allowed nodes of an example, by name of the example."""

LABELS: Final = {
    "v100": {"node.kubernetes.io/instance-type": "p3.8xlarge"},
    "a100-40": {"node.kubernetes.io/instance-type": "p4d.24xlarge"},
    "tainted": {"example.com/pool": "tainted"},
    "spot": {"cloud.google.com/gke-spot": "true"},
}
TAINTS: Final = {
    "tainted": {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
    "spot": {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"},
    # Whole and shared GPUs have the same resource name there: without renaming, administrators must
    # separate them.
    "plain": {"key": "example.com/shares", "value": "true", "effect": "PreferNoSchedule"},
    "single": {"key": "example.com/mig", "value": "true", "effect": "PreferNoSchedule"},
}


def objects(path: Path) -> list[Object]:
    return [item for item in yaml.safe_load_all(path.read_text()) if item]


def workload(path: Path) -> Object:
    return objects(path)[-1]


def template(item: Object) -> Object:
    found: Object = item if item["kind"] == "Pod" else item["spec"]["template"]
    return found


def add_fleet(world: World) -> None:
    """Add a node of every kind that an example requests."""
    world.add("v100", 4, V100)
    world.add("a100-40", 8, A100_40GB)
    world.add("a100-80", 8, A100_80GB)
    world.add("h100-a", 8, H100)
    world.add("h100-b", 8, H100)
    world.add("tainted", 2, H100)
    world.add("spot", 2, H100)
    sliced = {"sharing": Sharing.TIME_SLICING, "replicas": 4, "exporter": EXPORTER_4_8}
    world.add("sliced", 2, A10, is_renamed=True, **sliced)
    world.add("plain", 1, T4, **sliced)
    world.add("mps", 2, L40S, is_renamed=True, **{**sliced, "sharing": Sharing.MPS})
    world.add("mig", 1, H100, mig=(("1g.10gb", "1g.10gb", "2g.20gb"),))


async def mark_nodes(world: World, prefix: str) -> None:
    """Label and taint nodes as clouds and administrators do; wait until kube-scheduler knows."""
    product = "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"
    single = node(f"{prefix}single", 7, labels={"nvidia.com/gpu.product": product})
    await world.client.create(single)
    for name in LABELS.keys() | TAINTS.keys():
        change: Object = {"metadata": {"labels": LABELS.get(name, {})}}
        if name in TAINTS:
            change["spec"] = {"taints": [TAINTS[name]]}
        await world.client.patch({"kind": "Node", "metadata": {"name": f"{prefix}{name}"}}, change)
    await world.scheduler_synced(f"{prefix}single")


async def placements(world: World, prefix: str) -> dict[str, set[str]]:
    """Return the nodes of each example's pods; "" for a waiting pod."""
    found: dict[str, set[str]] = {}
    for pod in await world.client.list_pods():
        name = pod["metadata"]["labels"]["app.kubernetes.io/name"]
        where = pod["spec"].get("nodeName", "").removeprefix(prefix)
        found.setdefault(name, set()).add(where)
    return found


async def all_placed(world: World, prefix: str, names: set[str]) -> dict[str, set[str]]:
    """Wait until every pod of these examples is bound, and return their nodes."""

    async def placed() -> dict[str, set[str]] | None:
        found = await placements(world, prefix)
        is_complete = names <= found.keys() and not any("" in where for where in found.values())
        return found if is_complete else None

    try:
        return await wait_for(placed, "every example is placed")
    except TimeoutError as error:
        found = await placements(world, prefix)
        waiting = {name for name in names if "" in found.get(name, {""})}
        raise TimeoutError(f"{error}: {waiting}: {await world._unbound()}") from error


@pytest.mark.neighbours
@pytest.mark.e2e
async def test_each_example_is_placed_where_it_says(world: World) -> None:
    plane = world.services.plane
    add_fleet(world)
    await world.start()
    prefix = next(iter(world.fleet.nodes)).removesuffix("v100")
    await mark_nodes(world, prefix)
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "cache"},
        "spec": {
            "capacity": {"storage": "100Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/cache"},
        },
    }
    await world.client.request("POST", "/api/v1/persistentvolumes", volume)
    controllers = kube_controller_manager(plane)
    try:
        await controllers.start()
        for name in FIRST:
            await plane.kubectl("apply", "--validate=strict", "-f", str(EXAMPLES / f"{name}.yaml"))
        await all_placed(world, prefix, set(FIRST))
        await plane.kubectl("apply", "--validate=strict", "-f", str(EXAMPLES))
        found = await all_placed(world, prefix, {path.stem for path in FILES})

        elsewhere = {name: where - EXPECTED[name] for name, where in found.items()}
        assert {name: where for name, where in elsewhere.items() if where} == {}
        decided = await world.services.extender.get("/v1/decisions", {"limit": "1000"})
        requested = {decision["pod"].partition("/")[2] for decision in decided["decisions"]}
        assert {
            name for name in EXPECTED if not any(pod.startswith(name) for pod in requested)
        } == set()

        await scale_over_shares(world, prefix)
    finally:
        for path in FILES:
            for item in objects(path):
                item["metadata"]["namespace"] = "default"
                await world.client.request(
                    "DELETE", address_of(item), parameters={"propagationPolicy": "Background"}
                )
        await world.client.request("DELETE", "/api/v1/persistentvolumes/cache")
        await controllers.stop()


async def scale_over_shares(world: World, prefix: str) -> None:
    """Scale the Deployment to the remaining shares, and check that no card exceeds its memory."""
    name = "deployment-over-shares"
    await world.services.plane.kubectl("scale", "deployment", name, "--replicas=8")

    async def all_bound() -> list[str] | None:
        nodes = [
            pod["spec"].get("nodeName", "").removeprefix(prefix)
            for pod in await world.client.list_pods()
            if pod["metadata"]["labels"]["app.kubernetes.io/name"] == name
        ]
        return nodes if len(nodes) == 8 and all(nodes) else None

    nodes = await wait_for(all_bound, "eight replicas are placed")
    assert set(nodes) <= SHARED
    assert len(set(nodes)) == 2  # spread over both kinds of shares


@pytest.mark.neighbours
@pytest.mark.e2e
async def test_preferred_affinity_decides_among_equal_nodes(world: World) -> None:
    # By name alone the other node would be the first choice.
    world.add("a-h100", 4, H100)
    world.add("b-a100", 4, A100_40GB)
    await world.start()
    pod = template(workload(EXAMPLES / "gpu-by-preference.yaml"))
    item = {**pod, "apiVersion": "v1", "kind": "Pod"}
    item["metadata"] |= {"name": "preferring", "namespace": "default"}

    assert (await world.place(item)).endswith("a100")


def test_tables_have_every_example() -> None:
    guide = (EXAMPLES.parents[1] / "docs" / "examples.md").read_text()

    assert {path.stem for path in FILES} == EXPECTED.keys()
    assert [path.stem for path in FILES if f"`{path.stem}`" not in guide] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_complete_and_explained(path: Path) -> None:
    item = workload(path)
    pod = template(item)

    assert path.read_text().startswith("# ")
    assert item["metadata"]["name"] == path.stem
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == path.stem
    for container in pod["spec"]["containers"]:
        assert re.search(r":\d", container["image"]), "an image without a version"
        assert any("nvidia.com/" in name for name in container["resources"]["limits"])
    if item["kind"] == "Job":
        assert container["resources"]["requests"]["memory"]


def test_every_annotation_of_an_example_is_one_that_idlegpu_knows() -> None:
    readme = (EXAMPLES.parents[1] / "README.md").read_text()
    used = {
        name
        for path in FILES
        for name in template(workload(path))["metadata"].get("annotations", {})
    }

    assert used
    assert {name for name in used if not name.startswith(PREFIX)} == set()
    assert {name for name in used if f"`{name}`" not in readme} == set()


def create_command(path: Path) -> tuple[str, str]:
    """Return namespace and file of the command in a file's comment that creates it."""
    (words,) = re.findall(r"#   kubectl -n (\S+) create -f (\S+)", path.read_text())
    namespace, file = words
    return namespace, file


@pytest.mark.neighbours
@pytest.mark.e2e
@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
async def test_foreign_settings_are_accepted_by_their_own_command(
    installation: Installation, path: Path
) -> None:
    (item,) = objects(path)
    namespace, file = create_command(path)
    item["metadata"]["namespace"] = namespace
    with contextlib.suppress(ApiError):  # it exists already
        await installation.admin.create(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        )

    await installation.plane.kubectl(
        "-n", namespace, "create", "--validate=strict", "-f", str(path.with_name(file))
    )

    kept = await installation.admin.request("GET", address_of(item))
    await installation.admin.request("DELETE", address_of(item))
    assert kept["data"] == item["data"]


def test_device_plugin_settings_offer_the_names_in_the_examples() -> None:
    (item,) = objects(EXAMPLES / "settings" / "device-plugin.yaml")
    settings = {name: yaml.safe_load(text) for name, text in item["data"].items()}
    explained = "".join(path.read_text() for path in FILES)

    for name, setting in settings.items():
        assert setting["version"] == "v1"
        assert name == "whole" or f"`{name}`" in explained, f"no example needs {name}"
    renamed = {
        name: sharing["renameByDefault"]
        for name, setting in settings.items()
        for sharing in setting.get("sharing", {}).values()
    }
    assert renamed == {"time-slicing-renamed": True, "time-slicing": False, "mps": True}


def test_exporter_file_lists_only_used_metrics() -> None:
    (item,) = objects(EXAMPLES / "settings" / "dcgm-exporter.yaml")
    lines = [line for line in item["data"]["metrics"].splitlines() if not line.startswith("#")]
    fields = [line.split(", ", maxsplit=2) for line in lines]
    guide = (EXAMPLES.parents[1] / "docs" / "install.md").read_text()

    assert all(len(field) == 3 and field[1] in {"gauge", "counter"} for field in fields)
    names = {field[0] for field in fields}
    assert names - {metric.name for metric in DEFAULT_METRICS} == {"DCGM_FI_DEV_SM_CLOCK"}
    assert set(re.findall(r"`(DCGM_FI_\w+)`", guide)) <= names
