"""Each shipped kube-scheduler configuration in the real kube-scheduler."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from simulation import models
from simulation.models import GpuModel
from testkit.controlplane.deployed import scheduler_config
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.installing import Installation, wait_authorized
from testkit.controlplane.objects import Object, node, pod
from testkit.controlplane.process import ServerProcess, free_port
from testkit.controlplane.shipped import (
    EXTENDER_NAMESPACE,
    MANIFESTS,
    SCHEDULER_CONFIG,
    SECOND_SCHEDULER,
    built,
    find,
)
from testkit.controlplane.stub import StubExtender
from testkit.controlplane.tools import binary
from testkit.controlplane.waiting import wait_for

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

FILES = (SCHEDULER_CONFIG / "kube-scheduler.yaml", SECOND_SCHEDULER / "kube-scheduler.yaml")
SECOND = "idlegpu-scheduler"
OURS = {"key": "idlegpu.io/scheduler", "value": SECOND, "effect": "NoSchedule"}
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{EXTENDER_NAMESPACE}/leases/{SECOND}"

STATIC_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "kube-scheduler", "namespace": "kube-system"},
    "spec": {
        "containers": [
            {
                "name": "kube-scheduler",
                "image": "registry.k8s.io/kube-scheduler:v1.37.2",
                "command": ["kube-scheduler", "--kubeconfig=/etc/kubernetes/scheduler.conf"],
                "volumeMounts": [
                    {"mountPath": "/etc/kubernetes/scheduler.conf", "name": "kubeconfig"}
                ],
            }
        ],
        "hostNetwork": True,
        "volumes": [{"hostPath": {"path": "/etc/kubernetes/scheduler.conf"}, "name": "kubeconfig"}],
    },
}
"""Excerpt of kubeadm's file in /etc/kubernetes/manifests, with the fields that the patch uses."""

MIG_PROFILES = {
    "A30": "1g.6gb 1g.6gb+me 2g.12gb 2g.12gb+me 4g.24gb",
    "A100 40GB": "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
    "A100 80GB, H100 80GB": "1g.10gb 1g.10gb+me 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb",
    "H100 94GB": "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb",
    "H100 96GB, GH200, H20": "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
    "H200": "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
    "GH200 144GB": "1g.18gb 1g.18gb+me 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb",
    "B200": "1g.23gb 1g.23gb+me 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
    "GB200": "1g.23gb 1g.23gb+me 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb",
    "GB200 before": "1g.24gb 1g.24gb+me 1g.47gb 2g.47gb 3g.95gb 4g.95gb 7g.189gb",
    "B300": "1g.34gb 1g.34gb+me 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb",
    "GB300": "1g.35gb 1g.35gb+me 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb",
    "RTX PRO 6000 Blackwell": "1g.24gb 1g.24gb+me 1g.24gb+gfx 1g.24gb+me.all 1g.24gb-me 2g.48gb "
    "2g.48gb+gfx 2g.48gb+me.all 2g.48gb-me 4g.96gb 4g.96gb+gfx",
}
"""From NVIDIA's MIG user guide (Supported MIG Profiles), the GPU operator's release notes and its
default-mig-parted-config; GB300 from NVIDIA's k8s-test-infra (profiles of nvml-mock)."""


def extender_of(path: Path) -> Object:
    (extender,) = yaml.safe_load(path.read_text())["extenders"]
    return dict(extender)


@pytest_asyncio.fixture
async def second_scheduler(installation: Installation) -> AsyncIterator[StubExtender]:
    """Run the second scheduler as in its manifest, with a stub as extender."""
    await installation.apply(MANIFESTS)
    items = await installation.apply(SECOND_SCHEDULER)
    async with await installation.client(EXTENDER_NAMESPACE, SECOND) as client:
        await wait_authorized(
            client,
            "update",
            "leases",
            group="coordination.k8s.io",
            namespace=EXTENDER_NAMESPACE,
            name=SECOND,
        )
    async with StubExtender(best="second-b") as stub:
        process = await second_process(installation, items, stub.url)
        try:
            await process.start()
            yield stub
        finally:
            await process.stop()
            await installation.admin.request("DELETE", LEASE)


async def second_process(
    installation: Installation, items: list[Object], extender_url: str
) -> ServerProcess:
    (file,) = (
        item["data"]["kube-scheduler.yaml"]
        for item in items
        if item["kind"] == "ConfigMap" and item["metadata"]["name"].startswith(SECOND)
    )
    kubeconfig = await installation.kubeconfig(EXTENDER_NAMESPACE, SECOND)
    config = yaml.safe_load(file)
    config["clientConnection"] = {"kubeconfig": str(kubeconfig)}
    (extender,) = config["extenders"]
    extender["urlPrefix"] = extender_url  # a stub without TLS: test_tls.py tests TLS
    del extender["enableHTTPS"], extender["tlsConfig"]
    folder = installation.plane.folder
    (folder / "second.config").write_text(json.dumps(config))
    (container,) = find(items, "Deployment", SECOND)["spec"]["template"]["spec"]["containers"]
    port = free_port()
    given = {"--config": str(folder / "second.config"), "--secure-port": str(port)}
    arguments = [
        f"{name}={given.get(name, value)}"
        for name, _, value in (argument.partition("=") for argument in container["args"])
    ]
    return ServerProcess(
        name="second-scheduler",
        command=[
            str(binary(container["command"][0])),
            *arguments,
            f"--authentication-kubeconfig={kubeconfig}",
            f"--authorization-kubeconfig={kubeconfig}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates' / 'second'}",
        ],
        folder=folder,
        ready_url=f"https://127.0.0.1:{port}/readyz",
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_both_schedulers_call_the_extender_alike(path: Path) -> None:
    extender = extender_of(path)

    assert extender["ignorable"] is True
    assert extender["nodeCacheCapable"] is True
    assert extender["httpTimeout"] == "1s"
    assert [extender[f"{verb}Verb"] for verb in ("filter", "prioritize", "preempt")] == [
        "filter",
        "prioritize",
        "preempt",
    ]
    config = yaml.safe_load(path.read_text())
    assert config["percentageOfNodesToScore"] == 100
    assert config["podMaxBackoffSeconds"] == 60


@pytest.mark.parametrize("card", MIG_PROFILES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_mig_profile_of_a_card_is_listed_as_the_device_plugin_spells_it(
    path: Path, card: str
) -> None:
    listed = {resource["name"] for resource in extender_of(path)["managedResources"]}

    names = {name.replace("+", ".") for name in MIG_PROFILES[card].split()}

    assert {f"nvidia.com/mig-{name}" for name in names} <= listed


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_mig_profile_that_we_know_is_listed_once(path: Path) -> None:
    names = Counter(resource["name"] for resource in extender_of(path)["managedResources"])
    known = {
        f"nvidia.com/mig-{profile}"
        for model in vars(models).values()
        if isinstance(model, GpuModel)
        for profile in model.mig_memory_mib
    }

    assert len(known) > 5
    assert known | {"nvidia.com/gpu", "nvidia.com/gpu.shared"} <= names.keys()
    assert set(names.values()) == {1}


async def test_the_first_places_mig_pods_as_the_extender_says(
    installation: Installation, start_scheduler: StartScheduler
) -> None:
    profile = "nvidia.com/mig-1g.18gb"
    async with StubExtender(best="b") as stub:
        # A later node might be unknown when the first pod is placed.
        await installation.admin.create_all([node(name, {profile: 2}) for name in "abc"])
        await start_scheduler(scheduler_config(stub.url))
        for name in (SECOND, "default-scheduler"):
            item = pod(name, {profile: 1}, schedulerName=name)
            await installation.admin.create(item)

            assert await installation.admin.wait_bound(item) == "b"
        await installation.admin.create(pod("no-gpu", 0))
        await installation.admin.wait_bound(pod("no-gpu", 0))

        requested = [json.loads(body)["Pod"]["metadata"]["name"] for body in stub.bodies["filter"]]
        assert requested == [SECOND, "default-scheduler"]


async def test_second_scheduler_places_pods_with_its_rights(
    installation: Installation, second_scheduler: StubExtender
) -> None:
    own = {"idlegpu.io/scheduler": SECOND}
    for item in (
        *(node(f"others-{name}") for name in "ab"),
        *(node(f"second-{name}", labels=own, taints=[OURS]) for name in "ab"),
    ):
        await installation.admin.create(item)
    toleration = {**OURS, "operator": "Equal"}
    # Once it places a pod on the last node, it knows all of them.
    last = {"kubernetes.io/hostname": "second-b"}
    probe = pod("p", 0, schedulerName=SECOND, tolerations=[toleration], nodeSelector=last)
    await installation.admin.create(probe)
    await installation.admin.wait_bound(probe)
    mine = pod("mine", schedulerName=SECOND, tolerations=[toleration])
    intolerant = pod("intolerant", schedulerName=SECOND)
    elsewhere = pod("elsewhere")
    for item in (elsewhere, intolerant, mine):
        await installation.admin.create(item)

    assert await installation.admin.wait_bound(mine) == "second-b"
    message = await installation.admin.wait_unschedulable(intolerant)
    assert "untolerated taint" in message
    assert "didn't match scheduler-enforced node affinity" in message
    assert not (await installation.admin.get(elsewhere))["spec"].get("nodeName")
    requested = {
        json.loads(body)["Pod"]["metadata"]["name"] for body in second_scheduler.bodies["filter"]
    }
    assert "elsewhere" not in requested
    held = await installation.admin.request("GET", LEASE)
    assert held["spec"]["holderIdentity"]
    # It writes the event some time after the binding.
    events = await wait_for(lambda: installation.admin.events(mine), "the pod has an event")
    assert [event["reason"] for event in events] == ["Scheduled"]


async def test_the_division_by_taint_keeps_other_schedulers_away(
    installation: Installation, start_scheduler: StartScheduler
) -> None:
    async with StubExtender(best="second-a") as stub:
        await start_scheduler(scheduler_config(stub.url))
        own = {"idlegpu.io/scheduler": SECOND}
        await installation.admin.create_all(
            [node("second-a", labels=own, taints=[OURS]), node("others-a")]
        )
        stock = pod("stock")
        await installation.admin.create(stock)

        assert await installation.admin.wait_bound(stock) == "others-a"


async def test_the_kubeadm_patch_adds_the_configuration_and_keeps_the_rest(
    installation: Installation, tmp_path: Path
) -> None:
    patch = SCHEDULER_CONFIG / "kubeadm" / "patches" / "kube-scheduler0+json.yaml"
    manifest = tmp_path / "kube-scheduler.yaml"
    manifest.write_text(yaml.safe_dump(STATIC_POD))

    patched = yaml.safe_load(
        await installation.plane.kubectl(
            "patch",
            "--local",
            "--type=json",
            f"--filename={manifest}",
            f"--patch-file={patch}",
            "--output=yaml",
        )
    )

    before: Object = STATIC_POD["spec"]["containers"][0]  # type: ignore[index] # plain JSON
    (after,) = patched["spec"]["containers"]
    assert after["command"] == [
        *before["command"],
        "--config=/etc/kubernetes/idlegpu/kube-scheduler.yaml",
    ]
    (added,) = [mount for mount in after["volumeMounts"] if mount not in before["volumeMounts"]]
    (volume,) = [item for item in patched["spec"]["volumes"] if item["name"] == added["name"]]
    assert added["readOnly"]
    assert volume["hostPath"]["path"] == added["mountPath"] == "/etc/kubernetes/idlegpu"


def test_kubeadms_own_words_say_the_same_as_the_patch() -> None:
    folder = SCHEDULER_CONFIG / "kubeadm"
    patch = yaml.safe_load((folder / "patches" / "kube-scheduler0+json.yaml").read_text())
    scheduler = yaml.safe_load((folder / "cluster-configuration.yaml").read_text())["scheduler"]
    (argument,) = scheduler["extraArgs"]
    (volume,) = scheduler["extraVolumes"]
    command, mount, host = (operation["value"] for operation in patch)

    assert command == f"--{argument['name']}={argument['value']}"
    assert mount == {key: volume[key] for key in ("name", "mountPath", "readOnly")}
    assert host["hostPath"] == {"path": volume["hostPath"], "type": volume["pathType"]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_both_schedulers_use_mutual_tls(path: Path) -> None:
    extender = extender_of(path)
    tls = extender["tlsConfig"]

    assert extender["urlPrefix"].startswith("https://")
    assert extender["enableHTTPS"] is True
    assert not tls.get("insecure")
    assert tls["serverName"] == "idlegpu-extender.idlegpu.svc"
    folder = "/etc/kubernetes/idlegpu"
    assert [tls[name] for name in ("caFile", "certFile", "keyFile")] == [
        f"{folder}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")
    ]


def test_second_scheduler_reads_the_generated_configuration() -> None:
    items = built(SECOND_SCHEDULER)
    (config,) = [item["metadata"]["name"] for item in items if item["kind"] == "ConfigMap"]
    volumes = find(items, "Deployment", SECOND)["spec"]["template"]["spec"]["volumes"]

    assert volumes[0]["configMap"]["name"] == config
    assert config != f"{SECOND}-config"
