"""Commands against a real cluster: by URL, and through the API server's proxy."""

import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from testkit.controlplane.forwarding import forwarding, machine_address
from testkit.controlplane.objects import GPU, Object, pod
from testkit.controlplane.plane import SCHEDULER
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.ways import Way, opted_in
from testkit.controlplane.world import World
from tests.e2e.console import CommandLine, by_kubectl, by_proxy, by_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NAMESPACE: Final = "idlegpu"
SERVICE: Final = "idlegpu-extender"


def service(port: int) -> Mapping[str, object]:
    """Return the extender's Service as in the manifests."""
    metadata = {"name": SERVICE, "namespace": NAMESPACE}
    ports = [{"name": "status", "port": 8889, "targetPort": port}]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": ports}}


def behind_service(address: str, port: int) -> Mapping[str, object]:
    """Return the Service's EndpointSlice for an address, which API servers read from 1.37 on."""
    # The proxy only forwards to addresses of pods.
    target = {"kind": "Pod", "name": SERVICE, "namespace": NAMESPACE}
    labels = {"kubernetes.io/service-name": SERVICE}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": SERVICE, "namespace": NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "targetRef": target}],
        "ports": [{"name": "status", "port": port}],
    }


def _is_plain(world: World) -> bool:
    """Return whether only the extender's rights of the manifests were applied."""
    return world.services.setup.way is Way.PLAIN


@asynccontextmanager
async def exposed(world: World) -> AsyncIterator[None]:
    """Create the extender's Service, and a pod behind it with the running extender's address."""
    address, plane = machine_address(), world.services.plane
    if not address:
        pytest.skip("this machine has no address that an EndpointSlice may have")

    async def leads_there() -> bool:
        return (await by_proxy(world).run("nodes")).status == 0

    behind = pod(
        SERVICE,
        0,
        namespace=NAMESPACE,
        schedulerName="none",
        serviceAccountName=SERVICE,
        securityContext={"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    )
    # The namespace accepts no other pods.
    behind["spec"]["containers"][0]["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    async with forwarding(address, world.services.extender.url) as port:
        file = plane.folder / "service.yaml"
        items = [*([service(port)] if _is_plain(world) else []), behind_service(address, port)]
        file.write_text(yaml.safe_dump_all(items))
        await world.client.create(behind)
        try:
            await world.client.set_phase(behind, "Running", podIP=address, podIPs=[{"ip": address}])
            await plane.kubectl("apply", "-f", str(file))
            await wait_for(leads_there, "the API server knows where the Service leads")
            yield
        finally:
            await plane.kubectl("delete", "--ignore-not-found", "-f", str(file))
            await world.client.delete(behind)


async def placed(world: World) -> tuple[str, str, Object]:
    """Start with an idle and a busy node, and place a pod; return all three."""
    # One GPU more, so that the idle node stays the better one after the pod.
    idle, busy = world.add("idle", 3), world.add("busy", 2)
    await world.start({"strategy": "spread"})
    await world.tenants(busy, 1, utilization=0.9, memory="60Gi")
    item = pod("mine")
    assert await world.place(item) == idle
    await world.settled()
    return idle, busy, item


async def test_commands_show_the_state_of_the_cluster(world: World) -> None:
    idle, busy, item = await placed(world)
    idlegpu = by_url(world)

    nodes = await idlegpu("nodes")
    gpus = await idlegpu("gpus", busy, "-o", "json")
    best = await idlegpu("best", "--gpus", "1", "-o", "json")
    none = await idlegpu("best", "--gpus", "8", status=1)
    decided = await idlegpu("decisions", "default/mine")
    top = await idlegpu("top", "--once")

    assert [line.split()[0] for line in nodes.out.splitlines()[1:]] == sorted([busy, idle])
    states = [gpu["state"] for gpu in gpus.json["gpus"]]
    assert sorted(states) == ["busy", "idle"]
    assert best.json["best"][0]["node"] == idle
    assert "no node suits" in none.out
    assert idle in decided.out
    assert "yes" in decided.out
    assert top.out.splitlines()[3].startswith(f"{busy}::")

    # A bound pod is explained, and reported in one event.
    explained = await idlegpu("explain", "default/mine")
    shown = await world.describe(item, "GPU placement: ")

    # and its GPU, once readings show it
    assert explained.out.startswith(f"default/mine: is on {idle}")
    assert ", idlegpu's first choice\n" in explained.out
    assert busy in explained.out
    assert "prometheus" in explained.out
    assert "certain to get an idle GPU; 3 idle of 3" in explained.out
    assert "3 of its 3 GPUs were idle; GPUs open to the pod: mean activity 0 %" in shown
    assert shown.count("GPU placement: ") == 1


async def test_waiting_pod_states_its_reason(world: World) -> None:
    await placed(world)
    idlegpu = by_url(world)
    await world.client.create_all([pod("large", 4), pod("strict", 1, nodeSelector={"no": "such"})])
    for name in ("large", "strict"):
        await world.client.wait_unschedulable(pod(name))

    large = await idlegpu.until("Insufficient nvidia.com/gpu", "explain", "large")
    await idlegpu.until("didn't match Pod's node affinity/selector", "explain", "strict")
    pending = await idlegpu("pending", "-o", "json")

    assert "default/large: waits: unschedulable" in large.out
    assert "what would help: 2 Insufficient nvidia.com/gpu" in large.out
    found = {one["pod"]: one for one in pending.json["pods"]}
    assert found["default/large"]["by_scheduler"] == [
        {"count": 2, "reason": "Insufficient nvidia.com/gpu"}
    ]
    assert found["default/strict"]["by_scheduler"][0]["reason"] == (
        "node(s) didn't match Pod's node affinity/selector"
    )
    assert found["default/large"]["by_us"] == []


async def test_pending_reports_refusals_by_kube_schedulers_own_filters(world: World) -> None:
    world.add("open", 2)
    tainted = world.add("tainted", 2)
    await world.start()
    await world.services.plane.kubectl("taint", "node", tainted, "team=red:NoSchedule")
    await world.scheduler_synced(tainted)
    elsewhere = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}
    required = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [elsewhere]}
    }
    await world.client.create_all(
        [
            pod("cpu", {GPU: 1, "cpu": "1000"}),
            pod("memory", {GPU: 1, "memory": "100Ti"}),
            pod("affinity", 1, affinity={"nodeAffinity": required}),
        ]
    )
    idlegpu = by_url(world)
    wanted = {
        "cpu": "Insufficient cpu",
        "memory": "Insufficient memory",
        "affinity": "node(s) didn't match Pod's node affinity/selector",
    }
    for name, reason in wanted.items():
        await idlegpu.until(reason, "explain", name)

    pods = (await idlegpu("pending", "-o", "json")).json["pods"]

    by_pod = {one["pod"].partition("/")[2]: one for one in pods}
    assert by_pod.keys() == wanted.keys()
    for name, reason in wanted.items():
        counted = {one["reason"]: one["count"] for one in by_pod[name]["by_scheduler"]}
        (taint,) = (text for text in counted if text != reason)
        assert counted == {reason: 1, taint: 1}
        assert taint.startswith("node(s) had untolerated taint")
        assert by_pod[name]["by_us"] == []


async def test_our_refusals_are_distinguished_from_those_of_kube_scheduler(world: World) -> None:
    free = world.add("free", 2)
    world.add("other", 1)
    await world.start()
    for card in world.fleet.node(free).cards:
        card.xid = 79
    await world.wait_state(free, 0, "unhealthy")
    item = pod("picky", 2)
    await world.client.create(item)

    shown = await by_url(world).until("too few working GPUs", "pending")

    assert "1 Insufficient nvidia.com/gpu" in shown.out
    assert "default/picky" in shown.out


async def test_what_if_predicts_the_placement(world: World) -> None:
    idle, _, _ = await placed(world)
    idlegpu = by_url(world)
    run = ("run", "--gpus", "1", "--scheduler", world.services.setup.scheduler_name)
    printed = await idlegpu(*run, "--name", "job", "--", "true")
    file = world.services.plane.folder / "job.yaml"
    file.write_text(printed.out)

    foreseen = await idlegpu("explain", "-f", str(file))
    assert yaml.safe_load(printed.out)["kind"] == "Job"
    assert f"would go to {idle}" in foreseen.out

    made = await idlegpu(*run, "--name", "worker", "--hold", "--apply")
    assert made.out == "pod/worker\n"
    assert await world.bound([pod("worker")]) == [idle]


async def test_a_job_is_submitted(world: World) -> None:
    world.add("any", 1)
    await world.start()

    made = await by_url(world)("run", "--name", "job", "--apply", "--", "nvidia-smi")

    assert made.out == "job/job\n"
    jobs = await world.services.plane.kubectl("get", "jobs", "-o", "name")
    assert "job.batch/job" in jobs
    await world.services.plane.kubectl("delete", "job", "job")


async def test_the_documented_example_of_the_client_sizes_and_submits_a_job(world: World) -> None:
    world.add("any", 1)
    await world.start()
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    _, example = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    ran = await by_url(world).with_program(sys.executable, "-c", example)()

    certainty, *_, name = ran.out.split()
    assert certainty == "estimated"
    kubectl = world.services.plane.kubectl
    job = json.loads(await kubectl("get", "job", name, "-o", "json"))
    await kubectl("delete", "job", name)
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["command"] == ["python", "train.py"]
    assert container["env"] == [{"name": "EPOCHS", "value": "3"}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "cpu": "8", "memory": "64Gi"}
    assert template["metadata"]["annotations"]["idlegpu.io/gpu-memory"] == "19Gi"
    assert template["spec"]["activeDeadlineSeconds"] == 12 * 3600
    assert template["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "16Gi"


async def test_kubectl_knows_it_by_the_name_of_its_script(world: World) -> None:
    kubectl = by_kubectl(world)
    listed = CommandLine((str(binary("kubectl")), "plugin", "list"), PATH=kubectl.path)

    assert f"{Path(sys.executable).parent}/kubectl-idlegpu\n" in (await listed()).out
    assert (await kubectl("--help")).out.startswith("Usage: kubectl idlegpu [OPTIONS] COMMAND")


async def test_the_same_is_shown_through_the_api_servers_proxy(world: World) -> None:
    idle, busy, _ = await placed(world)
    idlegpu = by_proxy(world)
    async with exposed(world):
        plugin = await by_kubectl(world)("nodes", "-o", "json")
        failing = await by_kubectl(world)("gpus", "gone", status=1)
        nodes = await idlegpu("nodes", "-o", "json")
        gpus = await idlegpu("gpus", idle)
        best = await idlegpu("best", "-o", "json")
        explained = await idlegpu("explain", "mine")
        pending = await idlegpu("pending")
        decisions = await idlegpu("decisions")
        missing = await idlegpu("gpus", "gone", status=1)
        foreseen = await idlegpu("explain", "-f", str(_manifest(world)))
    # The Service, or in an installed cluster its EndpointSlice: the proxy's error is the same.
    gone = await idlegpu("nodes", status=3)
    refused = await by_proxy(world, SCHEDULER)("nodes", status=4)

    assert {node["name"] for node in nodes.json["nodes"]} == {idle, busy}
    assert {node["name"] for node in plugin.json["nodes"]} == {idle, busy}
    assert "node 'gone' is not known" in failing.err
    assert f"{idle}::0" in gpus.out
    assert best.json["feasible"] >= 1
    assert f"is on {idle}" in explained.out
    assert pending.out == "no GPU pod waits\n"
    assert "default/mine" in decisions.out
    assert "node 'gone' is not known" in missing.err
    assert f"would go to {idle}" in foreseen.out
    assert f"service {NAMESPACE}/{SERVICE}:status" in gone.err
    assert "forbidden" in refused.err


def _manifest(world: World) -> Any:
    file = world.services.plane.folder / "pod.yaml"
    item: Object = {"apiVersion": "v1", "kind": "Pod", **pod("next")}
    if world.services.setup.way is Way.SECOND:
        item = opted_in(item)
    file.write_text(yaml.safe_dump(item))
    return file
