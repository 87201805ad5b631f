"""The doctor on a real cluster: no finding without a fault, and a finding for each fault."""

import base64
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from extender.cli.commands.doctor import CHECKS
from simulation.models import A10
from simulation.nodes import EXPORTER_4_8, Sharing
from testkit.certificates import issue
from testkit.controlplane.deployed import grant_rights
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.plane import EXTENDER, ControlPlane
from testkit.controlplane.waiting import wait_for
from testkit.controlplane.world import World
from tests.e2e.console import by_url

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMESPACE: Final = "idlegpu"
SHARED: Final = "nvidia.com/gpu.shared"
TOO_NEW: Final = "cuda>=13.9"


@asynccontextmanager
async def installed(
    world: World, *, certificate_days: int, extender: Mapping[str, object] | None = None
) -> AsyncIterator[None]:
    """Create the other objects of an installation.

    Args:
        world: the cluster.
        certificate_days: remaining days of the certificates.
        extender: fields to change in the extender's entry of kube-scheduler's configuration.
    """
    plane = world.services.plane
    config = world.services.scheduler_config(extender)
    folder = plane.folder / f"certificates-{certificate_days}"
    # They are issued for a year.
    issue(folder, days_ago=365 - certificate_days)
    items = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "kube-scheduler", "namespace": "kube-system"},
            "data": {"kube-scheduler.yaml": yaml.safe_dump(config)},
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "idlegpu-extender", "namespace": NAMESPACE},
            "data": {"settings.yaml": world.services.extender.config.read_text()},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "idlegpu-extender-tls", "namespace": NAMESPACE},
            "data": {"tls.crt": _encoded(folder / "extender" / "tls.crt")},
        },
    ]
    file = plane.folder / "installed.yaml"
    file.write_text(yaml.safe_dump_all(items))
    await plane.kubectl("apply", "-f", str(file))
    try:
        yield
    finally:
        await plane.kubectl("delete", "--ignore-not-found", "-f", str(file))


def _encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def shown(report: Any) -> dict[str, str]:
    """Return the evidence by code."""
    found: dict[str, str] = {}
    for one in report["findings"]:
        found[one["code"]] = "\n".join([found.get(one["code"], ""), *one["evidence"]]).strip()
    return found


async def healthy(world: World) -> tuple[str, str]:
    """Start a healthy cluster with whole and shared GPUs, some in use; return both nodes."""
    whole = world.add("whole", 4)
    shared = world.add(
        "shared",
        2,
        A10,
        sharing=Sharing.TIME_SLICING,
        replicas=4,
        is_renamed=True,
        exporter=EXPORTER_4_8,
    )
    # Remove series of other tests, whose nodes do not exist anymore.
    await world.services.prometheus.restart_empty()
    await world.start()
    share = pod("share", {SHARED: 1}, **_remembering())
    await world.place(pod("train", 2))
    await world.place(share)
    await world.settled()
    for name in (whole, shared):
        await beat(world.services.plane, name, datetime.now(UTC))
    return whole, shared


async def beat(plane: ControlPlane, name: str, at: datetime) -> None:
    """Write a kubelet's heartbeat with the given time; the API server records the real time."""
    ready = {
        "type": "Ready",
        "status": "True",
        "lastHeartbeatTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    patch_body = json.dumps({"status": {"conditions": [ready]}})
    patch = ("patch", "node", name, "--subresource=status", "--field-manager=kubelet")
    await plane.kubectl(*patch, "--type=strategic", "-p", patch_body)


def _remembering() -> dict[str, Any]:
    return {"annotations": {"idlegpu.io/gpu-memory": "1Gi"}}


async def test_nothing_is_found_in_a_healthy_cluster(world: World, tmp_path: Path) -> None:
    await healthy(world)
    idlegpu = by_url(world)
    async with installed(world, certificate_days=200):
        done = await idlegpu("doctor", "-o", "json")
        table = await idlegpu("doctor")

    assert shown(done.json) == {}
    assert {one["code"]: one["why"] for one in done.json["not_run"]} == {}
    assert len(done.json["passed"]) == len(CHECKS)
    assert table.out == (
        f"findings: 0 error, 0 warning, 0 info; checks passed: {len(CHECKS)}, could not run: 0\n"
    )
    await check_without_rights_does_not_pass(world)
    await same_files_are_looked_at_offline(world, tmp_path)


def _is_running(item: Object) -> bool:
    return bool(item["status"]["phase"] == "Running")


async def broken_by_driver(world: World) -> None:
    """Create a pod whose container cannot start, with the status that the kubelet would report."""
    item = pod("new", 1)
    await world.place(item)
    await world.client.wait_pod(item, _is_running, "runs")
    message = f"requirement error: unsatisfied condition: {TOO_NEW}, please update your driver"
    status = {
        "name": "main",
        "image": "main",
        "imageID": "",
        "ready": False,
        "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": message}},
    }
    await world.client.set_phase(item, "Running", containerStatuses=[status])


@asynccontextmanager
async def faulty(world: World, whole: str, shared: str) -> AsyncIterator[None]:
    """Create faults in nodes, pods and rights while the context is open."""
    client, plane = world.client, world.services.plane
    await broken_by_driver(world)
    # A node without telemetry, whose clock is late and whose resources contradict its labels.
    bare = node("bare", {"nvidia.com/mig-9g.99gb": 1})
    bare["metadata"]["labels"]["nvidia.com/gpu.present"] = "true"
    empty = node("empty", 0, labels={"nvidia.com/gpu.present": "true"})
    for item in (bare, empty):
        item["spec"]["unschedulable"] = True
        await client.create(item)
    await beat(plane, "bare", datetime.now(UTC) - timedelta(hours=1))
    relabelled = {"nvidia.com/gpu.replicas": "9", "nvidia.com/gpu.sharing-strategy": "mps"}
    await client.patch(
        {"kind": "Node", "metadata": {"name": shared}}, {"metadata": {"labels": relabelled}}
    )
    offered = {"allocatable": {"nvidia.com/gpu": "3"}}
    await client.patch({"kind": "Node", "metadata": {"name": whole}}, {"status": offered}, "status")
    server = pod("server", 1)
    server["spec"]["containers"][0] |= {
        "command": ["vllm", "serve", "model", "--tensor-parallel-size", "4"],
        "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "3"}],
    }
    await client.create(server)
    rare = pod("dcgm-exporter-rare", 0)
    rare["spec"]["containers"][0]["env"] = [{"name": "DCGM_EXPORTER_INTERVAL", "value": "180000"}]
    await client.create(rare)
    await plane.kubectl("delete", "-n", NAMESPACE, "role", "idlegpu-extender")
    try:
        yield
    finally:
        await grant_rights(plane)
        for item in (bare, empty):
            await client.delete(item)


async def test_each_planted_fault_is_found_and_no_other(world: World) -> None:
    whole, shared = await healthy(world)
    idlegpu = by_url(world)
    changed = {"nodeCacheCapable": False, "weight": 10, "preemptVerb": ""}
    async with faulty(world, whole, shared), installed(world, certificate_days=5, extender=changed):
        done = await idlegpu("doctor", "-o", "json", status=1)

    found = shown(done.json)
    assert found.keys() == {
        "IG003", "IG004", "IG005", "IG006", "IG103", "IG104", "IG105", "IG201", "IG202", "IG203",
        "IG204", "IG301", "IG302", "IG303", "IG402", "IG403",
    }  # fmt: skip
    assert "nodeCacheCapable: false" in found["IG003"]
    assert "ConfigMap kube-system/kube-scheduler kube-scheduler.yaml: weight: 10" in found["IG004"]
    assert "nvidia.com/mig-9g.99gb on bare" in found["IG006"]
    assert found["IG103"].startswith("default/dcgm-exporter-rare: collects every 180 s")
    assert re.search(r"^bare: 3[56]\d\d s behind$", found["IG104"])
    assert "bare: no pod of dcgm-exporter or idlegpu-agent" in found["IG105"]
    assert "empty: capacity nvidia.com/gpu: none" in found["IG201"]
    assert f"{shared}: nvidia.com/gpu.count=2, nvidia.com/gpu.replicas=9" in found["IG202"]
    assert found["IG203"] == f"{whole}: nvidia.com/gpu: capacity 4, allocatable 3"
    assert f"{shared}: nvidia.com/gpu.sharing-strategy=mps" in found["IG204"]
    assert found["IG301"] == (
        f"default/new on {whole}: the container runtime says: unsatisfied condition {TOO_NEW}"
    )
    assert "default/server: CUDA_VISIBLE_DEVICES='3', 1 GPUs requested" in found["IG302"]
    assert "--tensor-parallel-size 4, so 4 GPUs; it requests 1" in found["IG303"]
    assert "Secret idlegpu/idlegpu-extender-tls tls.crt" in found["IG402"]
    assert "may not create leases.coordination.k8s.io in idlegpu" in found["IG403"]


async def test_pods_that_are_bound_without_us_are_found(world: World) -> None:
    world.add("one", 2)
    await world.start(extender={"managedResources": [{"name": "example.com/other"}]})
    await world.place(pod("bypassed", 1))
    idlegpu = by_url(world)

    async def is_found() -> str:
        done = await idlegpu.run("doctor", "-o", "json")
        return shown(done.json).get("IG001", "")

    evidence = await wait_for(is_found, "the doctor finds pods bound without a call")

    scheduler = world.services.setup.scheduler_name
    assert f"1 pods of {scheduler} that request nvidia.com/gpu: not-called" in evidence


async def check_without_rights_does_not_pass(world: World) -> None:
    plane = world.services.plane
    idlegpu = by_url(world)

    # kube-scheduler's own account reads nodes and pods, but neither Secrets nor DaemonSets.
    done = await idlegpu.run(
        "doctor", "-o", "json", "--kubeconfig", str(plane.kubeconfig("scheduler"))
    )
    own = await idlegpu.run("doctor", "-o", "json", "--kubeconfig", str(plane.kubeconfig(EXTENDER)))
    alone = await idlegpu.run("doctor", "--url", "http://127.0.0.1:9", "-o", "json")

    why = {one["code"]: one["why"] for one in done.json["not_run"]}
    if world.services.setup.certificates is None:
        assert "forbidden" in why["IG402"]
    else:  # an extender with certificates reports their expiry itself
        assert "IG402" in done.json["passed"]
    assert "no readable ConfigMap holds one" in why["IG003"]
    assert "IG203" in done.json["passed"]
    # The extender's account checks its own rights.
    assert "IG403" in own.json["passed"]
    why = {one["code"]: one["why"] for one in alone.json["not_run"]}
    assert "cannot reach http://127.0.0.1:9" in why["IG106"]
    assert "IG106" not in alone.json["passed"]


async def same_files_are_looked_at_offline(world: World, tmp_path: Path) -> None:
    plane, idlegpu = world.services.plane, by_url(world)
    for name in ("nodes", "pods"):
        text = await plane.kubectl("get", name, "-A", "-o", "json")
        (tmp_path / f"{name}.json").write_text(text)
    config = world.services.scheduler_config({"weight": 10})
    (tmp_path / "scheduler.yaml").write_text(yaml.safe_dump(config))
    files = [str(tmp_path / name) for name in ("nodes.json", "pods.json", "scheduler.yaml")]

    done = await idlegpu("doctor", "--offline", *files, "-o", "json", status=1)

    assert shown(done.json).keys() == {"IG004", "IG105"}
