"""Remedies name the affected nodes, pods and DaemonSets if they are known."""

import re
from dataclasses import replace
from typing import Any, Final

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.findings import examine
from tests.extender.cli.doctor.faults import FAULTS, HEALTHY, MPS_NODE, beside
from tests.extender.cli.doctor.things import pod


def _owned(one: dict[str, Any], daemon_set: str) -> dict[str, Any]:
    one["metadata"]["ownerReferences"] = [{"kind": "DaemonSet", "name": daemon_set}]
    return one


INSTALLED: Final = tuple(
    _owned(pod(f"{name}-x", namespace="gpu-operator"), name)
    for name in (
        *("nvdp-nvidia-device-plugin", "nvdp-nvidia-device-plugin-gpu-feature-discovery"),
        *("nvidia-mig-manager", "dcgm-exporter"),
    )
)
DEAD_MPS: Final = pod(
    "nvdp-nvidia-device-plugin-mps-control-daemon-x",
    namespace="gpu-operator",
    ready=False,
    labels={"app.kubernetes.io/name": "nvidia-device-plugin"},
)


@pytest.mark.parametrize("name", FAULTS)
def test_remedy_names_known_objects(name: str) -> None:
    fault = FAULTS[name]
    changes: dict[str, Any] = dict(fault.changes)
    pods: tuple[Any, ...] = changes.get("pods") or HEALTHY.pods or ()
    facts = replace(HEALTHY, **{**changes, "pods": (*pods, *INSTALLED)})

    for finding in examine(facts, CHECKS).findings:
        assert not {"NODE", "NAMESPACE", "POD", "NVIDIA-DEVICE-PLUGIN"} & set(
            re.findall(r"[\w-]+", finding.remedy)
        ), finding.remedy


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        (
            "its sharing settings unlike the labels",
            "kubectl -n gpu-operator rollout restart daemonset nvdp-nvidia-device-plugin and, "
            "after it, kubectl -n gpu-operator rollout restart daemonset "
            "nvdp-nvidia-device-plugin-gpu-feature-discovery:",
        ),
        (
            "capacity unlike allocatable",
            "kubectl -n gpu-operator logs nvdp-nvidia-device-plugin-x (which GPU, which XID); once "
            "the GPU works again, restart that pod: kubectl -n gpu-operator delete pod "
            "nvdp-nvidia-device-plugin-x",
        ),
        (
            "device plugin missing",
            "kubectl -n gpu-operator logs nvdp-nvidia-device-plugin-x shows the cause",
        ),
        (
            "a MIG layout that failed",
            "kubectl -n gpu-operator logs nvidia-mig-manager-x; then kubectl label node node-1 ",
        ),
        (
            "MIG layouts unlike allocatable",
            "and kubectl -n gpu-operator rollout restart daemonset dcgm-exporter",
        ),
        ("a dead MPS daemon", "kubectl label node node-1 nvidia.com/mps.capable=true"),
    ],
)
def test_remedy_commands_name_existing_objects(name: str, reported: str) -> None:
    fault = FAULTS[name]
    changes: dict[str, Any] = dict(fault.changes)
    pods: tuple[Any, ...] = changes.get("pods") or HEALTHY.pods or ()
    facts = replace(HEALTHY, **{**changes, "pods": (*pods, *INSTALLED)})

    (finding,) = (one for one in examine(facts, CHECKS).findings if one.code == fault.code)

    assert reported in finding.remedy


def test_a_broken_daemon_is_restarted_by_its_own_name() -> None:
    pods = (*beside(), *INSTALLED, DEAD_MPS)
    facts = replace(HEALTHY, nodes=MPS_NODE, pods=pods)

    (finding,) = (one for one in examine(facts, CHECKS).findings if one.code == "IG204")

    name = "nvdp-nvidia-device-plugin-mps-control-daemon-x"
    assert finding.remedy == (
        f"kubectl -n gpu-operator logs {name} shows why; then kubectl -n gpu-operator delete pod "
        f"{name}"
    )
