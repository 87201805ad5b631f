"""Pods of the manifests: their permissions, and the nodes on which they run."""

import copy
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from testkit.controlplane.client import ApiError
from testkit.controlplane.fixtures import StartScheduler
from testkit.controlplane.installing import Installation
from testkit.controlplane.objects import Object, node
from testkit.controlplane.scheduler import scheduler_config
from testkit.controlplane.shipped import (
    AGENT_NAMESPACE,
    EXTENDER_NAMESPACE,
    FILLED_IN,
    MANIFESTS,
    SECOND_SCHEDULER,
    built,
    find,
    pod_of,
    with_components,
)
from testkit.controlplane.waiting import wait_for

pytestmark = [pytest.mark.neighbours, pytest.mark.e2e, pytest.mark.timeout(120)]

PODS: Final = "/api/v1/namespaces/{}/pods"
DRY_RUN: Final = {"dryRun": "All"}

GPU_NODES: Final = {
    "by-hand": {"idlegpu.io/agent": "true"},
    "gpu-operator": {"nvidia.com/gpu.present": "true"},
    "gpu-feature-discovery": {"nvidia.com/gpu.product": "NVIDIA-L4"},
    "nfd-vendor": {"feature.node.kubernetes.io/pci-10de.present": "true"},
    "nfd-compute": {"feature.node.kubernetes.io/pci-0302_10de.present": "true"},
    "nfd-display": {"feature.node.kubernetes.io/pci-0300_10de.present": "true"},
    "gke": {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"},
    "eks": {"k8s.amazonaws.com/accelerator": "nvidia-tesla-v100"},
    "karpenter": {"karpenter.k8s.aws/instance-gpu-manufacturer": "nvidia"},
    "eks-auto": {"eks.amazonaws.com/instance-gpu-manufacturer": "nvidia"},
    "aks": {"kubernetes.azure.com/accelerator": "nvidia"},
    "aks-older": {"accelerator": "nvidia"},
}
"""Labels of nodes with NVIDIA GPUs, by their origin."""

OTHER_NODES: Final = {
    "plain": {},
    "opted-out": {"nvidia.com/gpu.present": "true", "idlegpu.io/agent": "false"},
    "other-vendor": {"feature.node.kubernetes.io/pci-1002.present": "true"},
    "no-gpu-left": {"nvidia.com/gpu.present": "false"},
}


def run_as_root(pod: Object) -> None:
    pod["spec"]["securityContext"]["runAsNonRoot"] = False


def share_processes(pod: Object) -> None:
    pod["spec"]["hostPID"] = True


def mount_the_host(pod: Object) -> None:
    pod["spec"]["volumes"].append({"name": "host", "hostPath": {"path": "/var/log/pods"}})


def keep_capabilities(pod: Object) -> None:
    for container in pod["spec"]["containers"]:
        del container["securityContext"]["capabilities"]


async def test_every_pod_but_the_agents_is_admitted_where_restricted_is_enforced(
    installation: Installation,
) -> None:
    items = await installation.apply(MANIFESTS)
    items += await installation.apply(SECOND_SCHEDULER)

    workloads = [
        find(items, "Deployment", "idlegpu-extender"),
        find(items, "Deployment", "idlegpu-scheduler"),
        find(items, "Job", "idlegpu-certs"),
        find(items, "CronJob", "idlegpu-certs")["spec"]["jobTemplate"],
    ]
    for workload in workloads:
        name = workload["spec"]["template"]["spec"]["serviceAccountName"]
        pod = pod_of({"metadata": {"namespace": EXTENDER_NAMESPACE}, **workload}, name)
        path = PODS.format(EXTENDER_NAMESPACE)
        admitted = await installation.admin.request("POST", path, pod, parameters=DRY_RUN)

        assert admitted["metadata"]["namespace"] == EXTENDER_NAMESPACE


async def test_a_weaker_extender_is_refused_in_its_namespace(installation: Installation) -> None:
    items = await installation.apply(MANIFESTS)
    for weaken in (run_as_root, share_processes, mount_the_host, keep_capabilities):
        pod = copy.deepcopy(pod_of(find(items, "Deployment", "idlegpu-extender"), "weaker"))
        weaken(pod)

        with pytest.raises(ApiError, match='violates PodSecurity "restricted:latest"'):
            await installation.admin.request(
                "POST", PODS.format(EXTENDER_NAMESPACE), pod, parameters=DRY_RUN
            )


async def test_agent_meets_the_restricted_level_but_for_stated_exceptions(
    installation: Installation,
) -> None:
    items = await installation.apply(MANIFESTS)
    pod = pod_of(find(items, "DaemonSet", "idlegpu-agent"), "agent")
    elsewhere = copy.deepcopy(pod)
    elsewhere["metadata"]["namespace"] = EXTENDER_NAMESPACE
    elsewhere["spec"]["serviceAccountName"] = "idlegpu-extender"

    with pytest.raises(ApiError) as refusal:
        await installation.admin.request(
            "POST", PODS.format(EXTENDER_NAMESPACE), elsewhere, parameters=DRY_RUN
        )
    admitted = await installation.admin.request(
        "POST", PODS.format(AGENT_NAMESPACE), pod, parameters=DRY_RUN
    )

    _, _, violations = str(refusal.value).partition('latest": ')
    assert sorted(part.split(" (")[0].strip() for part in violations.split("), ")) == [
        "host namespaces",
        "restricted volume types",
        "runAsNonRoot != true",
        "runAsUser=0",
    ]
    assert admitted["metadata"]["namespace"] == AGENT_NAMESPACE


async def test_the_agent_is_admitted_however_it_gets_its_gpus(
    installation: Installation, tmp_path: Path
) -> None:
    folder = with_components(tmp_path, ["cdi", "gke", "kubelet-root", "privileged"])
    items = await installation.apply(folder)
    pod = pod_of(find(items, "DaemonSet", "idlegpu-agent"), "agent")

    admitted = await installation.admin.request(
        "POST", PODS.format(AGENT_NAMESPACE), pod, parameters=DRY_RUN
    )

    (container,) = admitted["spec"]["containers"]
    assert container["securityContext"]["privileged"]
    environ = {entry["name"]: entry.get("value") for entry in container["env"]}
    annotations = admitted["metadata"]["annotations"]
    assert annotations[f"nvidia.cdi.k8s.io/container.{container['name']}"].endswith("gpu=all")
    assert environ["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    paths = [each["hostPath"]["path"] for each in admitted["spec"]["volumes"] if "hostPath" in each]
    assert f"{FILLED_IN['KUBELET_ROOT']}/pod-resources" in paths
    assert "/home/kubernetes/bin/nvidia" in paths


def test_the_agent_reads_two_folders_of_its_node_and_writes_none() -> None:
    pod = pod_of(find(built(MANIFESTS), "DaemonSet", "idlegpu-agent"), "agent")["spec"]
    (container,) = pod["containers"]
    from_host = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}

    assert set(from_host.values()) == {"/var/lib/kubelet/pod-resources", "/var/log/pods"}
    assert all(mounts[name]["readOnly"] for name in from_host)
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"].get("privileged")
    assert not pod.get("hostNetwork")
    assert "nvidia.com/gpu" not in container["resources"].get("limits", {})


async def pods_by_node(installation: Installation, namespace: str, name: str) -> dict[str, int]:
    """Count the pods of one workload by node; "" for waiting pods."""
    counts: dict[str, int] = {}
    for pod in await installation.admin.list_pods(namespace):
        if pod["metadata"]["labels"]["app.kubernetes.io/name"] == name:
            where = pod["spec"].get("nodeName", "")
            counts[where] = counts.get(where, 0) + 1
    return counts


@pytest.mark.usefixtures("controllers", "kubelets")  # creates and deletes the DaemonSet's pods
async def test_agents_run_on_gpu_nodes_with_any_labels_and_taints(
    installation: Installation, start_scheduler: StartScheduler
) -> None:
    await start_scheduler(scheduler_config())
    for name, labels in (GPU_NODES | OTHER_NODES).items():
        tainted = node(
            name,
            labels=labels,
            taints=[
                {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
                {"key": "dedicated", "value": "training", "effect": "NoExecute"},
            ],
        )
        await installation.admin.create(tainted)
    await installation.apply(MANIFESTS)

    async def found() -> dict[str, int] | None:
        counts = await pods_by_node(installation, AGENT_NAMESPACE, "idlegpu-agent")
        return counts if len(counts) >= len(GPU_NODES) and "" not in counts else None

    assert await wait_for(found, "an agent on every GPU node") == dict.fromkeys(GPU_NODES, 1)

    async def wanted() -> int:
        path = f"/apis/apps/v1/namespaces/{AGENT_NAMESPACE}/daemonsets/idlegpu-agent"
        status = (await installation.admin.request("GET", path))["status"]
        count: int = status["desiredNumberScheduled"]
        return count  # 0 until the controller has its own pods in its cache

    assert await wait_for(wanted, "the DaemonSet counts its nodes") == len(GPU_NODES)

    label = "nvidia.com/gpu.deploy.client"
    for name, labels in GPU_NODES.items():
        paused = {"metadata": {"labels": {**labels, label: "paused-for-driver-upgrade"}}}
        await installation.admin.patch(node(name), paused)
    await wait_for(
        lambda: _runs_nowhere(installation), "no agent where the GPU operator upgrades the driver"
    )
    for name in GPU_NODES:
        await installation.admin.patch(node(name), {"metadata": {"labels": {label: "true"}}})

    assert await wait_for(found, "the agents are back") == dict.fromkeys(GPU_NODES, 1)


async def _runs_nowhere(installation: Installation) -> bool | None:
    return not await pods_by_node(installation, AGENT_NAMESPACE, "idlegpu-agent") or None


@pytest.mark.usefixtures("controllers", "kubelets")  # create and run the Deployment's pods
async def test_replicas_are_spread_and_a_rollout_never_leaves_fewer(
    installation: Installation, start_scheduler: StartScheduler
) -> None:
    await start_scheduler(scheduler_config())
    await installation.admin.create_all([node("a", 0), node("b", 0), node("gpus")])
    await installation.apply(MANIFESTS)
    path = f"/apis/apps/v1/namespaces/{EXTENDER_NAMESPACE}/deployments/idlegpu-extender"
    available: list[int] = []

    async def is_rolled_out(generation: int) -> bool:
        status = (await installation.admin.request("GET", path)).get("status", {})
        available.append(status.get("availableReplicas", 0))
        return (
            status.get("observedGeneration", 0) >= generation
            and status.get("replicas") == status.get("updatedReplicas") == 2
            and available[-1] == 2
        )

    await wait_for(partial(is_rolled_out, 1), "two replicas run")
    first = await pods_by_node(installation, EXTENDER_NAMESPACE, "idlegpu-extender")
    available.clear()
    change = {"spec": {"template": {"metadata": {"annotations": {"rolled": "out"}}}}}
    changed = await installation.admin.request(
        "PATCH", path, change, content_type="application/merge-patch+json"
    )
    await wait_for(partial(is_rolled_out, changed["metadata"]["generation"]), "two new ones run")

    assert list(first.values()) == [1, 1]
    assert min(available) == 2
