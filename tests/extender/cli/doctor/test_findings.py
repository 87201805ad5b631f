"""Findings of checks; the checks themselves, compared with their documentation."""

import re
from dataclasses import replace
from typing import Any, Final

import pytest

from extender.cli.commands.doctor import CHECKS
from extender.cli.doctor.facts import _LABELS, Facts, gpu_nodes, is_labelled, is_running
from extender.cli.doctor.findings import Check, Problem, Severity, examine
from tests.extender.cli.doctor.faults import FAULTS, HEALTHY, MPS_NODE, beside
from tests.extender.cli.doctor.things import NOW, pod
from tests.files import ROOT
from tests.reference import part_of

PAGE = ROOT / "docs" / "doctor.md"


def test_every_check_has_a_code_of_its_own_and_is_documented() -> None:
    assert len({check.code for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        assert re.fullmatch(r"Find .+\n\n +Remedy: .+", check.find.__doc__ or "", re.DOTALL)
        assert f"| {check.code} |" in part_of(PAGE.read_text(encoding="utf-8"), "checks")


def test_every_need_is_a_fact_with_a_name() -> None:
    for check in CHECKS:
        for need in check.needs:
            for name in need.split("|"):
                assert name in _LABELS
                assert getattr(Facts(at=NOW), name) is None


def test_without_facts_no_check_runs_and_none_passes() -> None:
    report = examine(Facts(at=NOW, missing={"nodes": "forbidden"}), CHECKS)

    assert (report.findings, report.passed) == ((), ())
    assert {one.code for one in report.not_run} == {check.code for check in CHECKS}
    why = {one.code: one.why for one in report.not_run}
    assert why["IG203"] == "nodes: forbidden"
    assert " or " in why["IG001"]


def test_the_gravest_is_reported_first() -> None:
    def find(severity: Severity) -> Check:
        problem = Problem(severity=severity, what="x", evidence=("y",), remedy="z")
        return Check(code=f"IG-{severity}", title="t", needs=(), find=lambda _: [problem])

    report = examine(Facts(at=NOW), [find(kind) for kind in reversed(Severity)])

    assert [finding.severity for finding in report.findings] == list(Severity)
    assert report.has_errors
    assert not examine(Facts(at=NOW), [find(Severity.WARNING)]).has_errors


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


def test_equally_grave_findings_are_sorted_by_code() -> None:
    problem = Problem(severity=Severity.ERROR, what="x", evidence=("y",), remedy="z")
    checks = [
        Check(code=code, title="t", needs=(), find=lambda _: [problem]) for code in ("IG2", "IG1")
    ]

    assert [one.code for one in examine(Facts(at=NOW), checks).findings] == ["IG1", "IG2"]


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com/gpu.present": "true"},
        {"feature.node.kubernetes.io/pci-10de.present": "true"},
        {"feature.node.kubernetes.io/pci-0300_10de.present": "true"},
        {"feature.node.kubernetes.io/pci-0302_10de.present": "true"},
        {"cloud.google.com/gke-accelerator": "nvidia-l4"},
        {"k8s.amazonaws.com/accelerator": "nvidia-l4"},
    ],
)
def test_a_node_has_gpus_by_any_of_these_labels(labels: dict[str, str]) -> None:
    item = {"metadata": {"name": "n", "labels": labels}}

    assert is_labelled(item)
    assert gpu_nodes(Facts(at=NOW, nodes=(item, {"metadata": {"name": "cpu"}}))) == [item]


def test_a_pod_runs_only_if_each_of_its_containers_is_ready() -> None:
    statuses = [{"ready": True}, {"ready": False}]

    assert not is_running(pod(statuses=statuses))
    assert is_running(pod(statuses=[{"ready": True}, {}]))
    assert not is_running(pod(phase="Failed", statuses=[]))
