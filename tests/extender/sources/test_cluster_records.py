from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extender.core.nodes.host_resources import HostResources
from extender.core.nodes.inventory import PodPhase, PodRecord, Taint
from extender.core.nodes.node_selection import Selection
from extender.core.nodes.pod_groups import likeness_of
from extender.sources.kubernetes.pod_failures import is_failed_early, parse_time
from extender.sources.kubernetes.records import (
    ExporterPod,
    reduce_exporter,
    reduce_node,
    reduce_pod,
)
from testkit.kube_objects import Object, node, pod
from testkit.pod_records import NAMES, START, T0, T30, T61, container, ended, reduced


def test_a_node_is_reduced_to_the_needed_fields() -> None:
    labels: dict[str, Any] = {
        "nvidia.com/gpu.product": "NVIDIA-H100",
        "nvidia.com/gfd.timestamp": "1",
        "nvidia.com/gpu.deploy.driver": "true",
        "nvidia.com/mig-1g.10gb.engines.copy": "1",
        "nvidia.com/mig-1g.10gb.count": "7",
        "topology.kubernetes.io/zone": "a",
        "karpenter.sh/nodepool": "gpu",
        "kubernetes.io/hostname": "n",
    }
    raw = node("n", **labels)
    raw["spec"] = {
        "unschedulable": True,
        "taints": [
            {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
            {"key": "gpu-soft", "value": "v", "effect": "PreferNoSchedule"},
            {"key": "soft", "effect": "PreferNoSchedule"},
            {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"},
        ],
    }
    raw["status"]["allocatable"] = {"nvidia.com/gpu": "7", "cpu": "64", "nvidia.com/mig-x": "bad"}
    raw["status"]["addresses"] += [
        {"type": "Hostname", "address": "n"},
        {"type": "InternalDNS", "address": "ip-10-0-0-1.ec2.internal"},
        {"type": "ExternalDNS", "address": "n.example.com"},
    ]

    record = reduce_node(raw, NAMES)

    assert record is not None
    assert (record.name, record.addresses) == ("n", ("10.0.0.1", "ip-10-0-0-1.ec2.internal"))
    assert (record.allocatable, record.capacity) == ({"nvidia.com/gpu": 7}, {"nvidia.com/gpu": 8})
    assert sorted(record.labels) == [
        "karpenter.sh/nodepool",
        "nvidia.com/gpu.product",
        "nvidia.com/mig-1g.10gb.count",
        "topology.kubernetes.io/zone",
    ]
    assert record.taints == (
        Taint(key="nvidia.com/gpu"),
        Taint(key="gpu-soft", value="v", effect="PreferNoSchedule"),
        Taint(key="node.kubernetes.io/not-ready", effect="NoExecute"),
    )
    assert record.is_unschedulable
    assert record.is_ready


@pytest.mark.parametrize(
    ("conditions", "is_ready"),
    [
        ([{"type": "Ready", "status": "True"}], True),
        ([{"type": "Ready", "status": "False"}], False),
        ([{"type": "Ready", "status": "Unknown"}], False),
        ([], True),
    ],
    ids=["ready", "not ready", "kubelet is silent", "unknown"],
)
def test_a_node_is_ready_unless_its_condition_says_otherwise(
    conditions: list[Object], is_ready: bool
) -> None:
    raw = node("n")
    raw["status"]["conditions"] = conditions

    record = reduce_node(raw, NAMES)

    assert record is not None
    assert record.is_ready is is_ready


def test_of_many_labels_taints_and_addresses_of_a_node_the_first_ones_are_stored() -> None:
    names = [f"{group}{at:04}" for group in ("a", "nvidia.com/") for at in range(600)]
    labels: dict[str, Any] = dict.fromkeys(names, "v")
    raw = node("n", **labels)
    raw["spec"] = {"taints": [{"key": f"k{at}", "effect": "NoSchedule"} for at in range(600)]}
    raw["status"]["addresses"] = [
        {"type": "InternalIP", "address": f"10.0.{at // 250}.{at % 250}"} for at in range(600)
    ]

    record = reduce_node(raw, NAMES)

    assert record is not None
    assert len(record.labels) == len(record.other_labels) == 512
    assert (len(record.taints), len(record.addresses)) == (100, 32)


def test_a_node_whose_devices_are_all_unhealthy_still_shows_its_capacity() -> None:
    raw = node("n", gpus=8)
    raw["status"]["allocatable"] = {"nvidia.com/gpu": "0"}

    record = reduce_node(raw, NAMES)

    assert record is not None
    assert (record.allocatable, record.capacity) == ({"nvidia.com/gpu": 0}, {"nvidia.com/gpu": 8})


@pytest.mark.parametrize(
    ("allocatable", "host"),
    [
        ({"cpu": "63500m", "memory": "2Gi"}, HostResources(63_500, 2 << 30)),
        ({"cpu": "4", "memory": "1Ki", "ephemeral-storage": "9"}, HostResources(4_000, 1024, 9)),
        ({"cpu": "4"}, None),
        ({"memory": "1Ki"}, None),
    ],
)
def test_the_resources_of_a_node_are_known_with_its_cpu_and_memory(
    allocatable: dict[str, str], host: HostResources | None
) -> None:
    raw = node("n")
    raw["status"]["allocatable"] = allocatable

    record = reduce_node(raw, NAMES)

    assert record is not None
    assert record.host == host


def test_a_waiting_pod_is_reduced() -> None:
    raw = pod(
        "p",
        gpus=2,
        nominatedNodeName="n",
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
    )
    raw["metadata"]["annotations"] = {"idlegpu.io/gpu-memory": "2Gi"}

    record = reduced(raw)

    assert record == PodRecord(
        uid="p",
        likeness=likeness_of(raw),
        namespace="ns",
        name="p",
        nominated_node="n",
        resources={"nvidia.com/gpu": 2},
        memory_bytes=2 << 30,
        wishes=(("idlegpu.io/gpu-memory", "2Gi"),),
        is_unscheduled=True,
        scheduler_name="idle",
        created_at=START,
        selection=Selection(),
    )


def test_a_running_pod_is_reduced() -> None:
    raw = pod(
        "p",
        node="n",
        phase="Running",
        conditions=[{"type": "PodScheduled", "status": "True", "lastTransitionTime": T30}],
        containerStatuses=[container(running={"startedAt": T61})],
    )
    raw["metadata"]["deletionTimestamp"] = T61

    record = reduced(raw)

    assert (record.node, record.phase, record.holds_devices) == ("n", PodPhase.RUNNING, True)
    assert (record.bound_at, record.started_at) == (START + 30, START + 61)
    assert record.ended_at is None
    assert record.is_deleting


@pytest.mark.parametrize(
    ("status", "bound_at"),
    [
        ({"startTime": T30}, START + 30),
        ({}, START),
        ({"conditions": [{"type": "PodScheduled", "lastTransitionTime": T61}]}, START),
    ],
    ids=["by its kubelet", "by its creation", "by a condition that is late"],
)
def test_a_pod_created_with_a_node_name_is_bound_from_the_start(
    status: Object, bound_at: float
) -> None:
    assert reduced(pod("p", node="n", **status)).bound_at == bound_at


def test_an_ended_pod_has_the_time_of_its_end() -> None:
    raw = pod(
        "p",
        node="n",
        phase="Failed",
        containerStatuses=[
            container(terminated=ended(start=T0, end=T30)),
            container(terminated=ended(start=T0, end=T61)),
        ],
    )

    record = reduced(raw)

    assert (record.started_at, record.ended_at) == (START, START + 61)
    assert not record.holds_devices


PROXY = {**container(running={"startedAt": T0}), "name": "proxy"}


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        pytest.param([container(running={"startedAt": T30})], (30, None), id="started-once"),
        pytest.param(
            [container(running={"startedAt": T61}) | container("lastState", terminated=ended())],
            (0, 61),
            id="started-again",
        ),
        pytest.param([PROXY, container(running={"startedAt": T61})], (0, 61), id="after-its-proxy"),
        pytest.param(
            [
                {**PROXY, "state": {"running": {"startedAt": T61}}},
                container(running={"startedAt": T30}),
            ],
            (30, None),
            id="before-its-proxy",
        ),
        pytest.param([PROXY], (0, None), id="not-yet"),
        pytest.param(
            [container(waiting={}) | container("lastState", terminated=ended())],
            (0, inf),
            id="waits-to-start-again",
        ),
    ],
)
def test_the_last_start_of_containers_with_gpus_is_stored(
    statuses: list[Object], expected: tuple[float, float | None]
) -> None:
    raw = pod("p", node="n", phase="Running", containerStatuses=statuses)
    raw["spec"]["containers"].append({"name": "proxy"})

    record = reduced(raw)

    first, last = expected
    assert record.started_at == START + first
    assert record.last_started_at == (None if last is None else START + last)


@pytest.mark.parametrize(
    ("sidecar", "main", "expected"),
    [
        pytest.param({"running": {"startedAt": T30}}, None, (30, None), id="before-the-others"),
        pytest.param({"running": {"startedAt": T61}}, T0, (0, 61), id="started-again"),
        pytest.param({"running": {"startedAt": T0}}, T30, (0, None), id="once"),
    ],
)
def test_a_sidecar_with_gpus_counts_as_a_container_with_gpus(
    sidecar: Object, main: str | None, expected: tuple[float, float | None]
) -> None:
    statuses = [{**container(running={"startedAt": main}), "name": "proxy"}] if main else []
    init = [
        {**container(running={"startedAt": T61}), "name": "plain-sidecar"},
        {**container(terminated=ended(0, T61, T61)), "name": "fetches"},
        container(**sidecar),
    ]
    raw = pod(
        "p", node="n", phase="Running", containerStatuses=statuses, initContainerStatuses=init
    )
    (serves,) = raw["spec"]["containers"]
    raw["spec"]["containers"] = [{"name": "proxy"}]
    raw["spec"]["initContainers"] = [
        {"name": "plain-sidecar", "restartPolicy": "Always"},
        {**serves, "name": "fetches"},
        {**serves, "restartPolicy": "Always"},
    ]

    record = reduced(raw)

    first, last = expected
    assert record.started_at == START + first
    assert record.last_started_at == (None if last is None else START + last)


@pytest.mark.parametrize(
    ("init", "lasting"), [(2, {"nvidia.com/gpu": 1}), (1, None), (0, None)], ids=str
)
def test_requests_of_init_containers_are_stored_separately(
    init: int, lasting: dict[str, int] | None
) -> None:
    raw = pod("p", 1)
    raw["metadata"]["uid"] = "p"
    requested = {"resources": {"limits": {"nvidia.com/gpu": str(init)}}}
    raw["spec"]["initContainers"] = [requested]

    record = reduced(raw)

    assert (record.resources, record.lasting) == ({"nvidia.com/gpu": max(init, 1)}, lasting)


def test_a_pod_without_devices_has_no_record() -> None:
    assert reduce_pod(pod("p", gpus=0), NAMES, early_seconds=60) is None


def test_an_unknown_phase_is_unknown() -> None:
    assert reduced(pod("p", phase="Dreaming")).phase is PodPhase.UNKNOWN


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nvidia-dcgm-exporter-abcde", {}),
        ("x", {"app": "dcgm-exporter"}),
        ("x", {"app.kubernetes.io/name": "dcgm-exporter"}),
    ],
    ids=["by its name", "by app", "by app.kubernetes.io/name"],
)
def test_an_exporter_is_recognized_by_name_or_label(name: str, labels: dict[str, str]) -> None:
    raw = pod(name, gpus=0, uid="u", node="n", phase="Running", podIP="10.0.0.9")
    raw["metadata"]["labels"] = labels

    assert reduce_exporter(raw, ("dcgm-exporter",)) == ExporterPod(
        namespace="ns", name=name, node="n", addresses=("10.0.0.9",)
    )


def test_other_pods_are_not_exporters() -> None:
    for raw in (
        pod("web", node="n"),
        pod("dcgm-exporter"),
        pod("dcgm-exporter", node="n", phase="Failed"),
    ):
        assert reduce_exporter(raw, ("dcgm-exporter",)) is None


@pytest.mark.parametrize(
    "value",
    [
        *("", "yesterday", None, 7, "2026-13-01T00:00:00Z"),
        *("0001-01-01T00:00:00Z", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"),
    ],
)
def test_an_invalid_time_is_none(value: object) -> None:
    assert parse_time(value) is None


def test_times_with_fractions_and_offsets_are_read() -> None:
    assert parse_time("2026-01-01T01:00:00.500000+01:00") == START + 0.5
    assert parse_time("2026-01-01T00:00:00") == START


def test_equal_counts_are_one_object() -> None:
    assert reduced(pod("a")).resources is reduced(pod("b")).resources


WORDS = """
    metadata spec status name uid conditions containerStatuses state lastState terminated running
    waiting startedAt finishedAt type taints key effect labels addresses allocatable reason
    containers resources limits nvidia.com/gpu nodeName podIPs ip
""".split()  # noqa: SIM905 - easier to read
json_values: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just(T0),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(json_values, json_values, json_values)
def test_no_object_raises(metadata: object, spec: object, status: object) -> None:
    raw = {"metadata": metadata, "spec": spec, "status": status}
    if isinstance(metadata, dict):
        metadata |= {"uid": "u", "name": "dcgm-exporter"}

    reduce_node(raw, NAMES)
    reduce_pod(raw, NAMES, early_seconds=60)
    reduce_exporter(raw, ("dcgm-exporter",))
    is_failed_early(raw, 60)


@pytest.mark.parametrize(("priority", "gives_way"), [(-5, True), (0, False), (None, False)])
def test_a_pod_of_negative_priority_may_be_preempted(priority: int | None, gives_way: bool) -> None:
    raw = pod("placeholder", 1)
    raw["spec"]["priority"] = priority
    raw["metadata"]["uid"] = "p"

    assert reduced(raw).gives_way is gives_way


def requiring(**expression: object) -> dict[str, Any]:
    """Return a specification that requires nodes by a label."""
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    return {"affinity": {"nodeAffinity": affinity}}


PRODUCT = "nvidia.com/gpu.product"


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        (requiring(key=PRODUCT, operator="In", values=["NVIDIA-L4", "NVIDIA-H200"]), "l4"),
        (requiring(key=PRODUCT, operator="NotIn", values=["NVIDIA-L4"]), "h200"),
        (requiring(key="team", operator="In", values=["NVIDIA-L4"]), "h200"),
        ({"nodeSelector": {"team": "NVIDIA-L4"}}, "h200"),
        ({}, "h200"),
    ],
)
def test_a_required_model_comes_before_a_preferred_one(spec: dict[str, Any], model: str) -> None:
    raw = pod("p")
    raw["metadata"]["annotations"] = {"idlegpu.io/prefer-models": "h200,l4"}
    raw["spec"] |= spec

    assert reduced(raw).wanted_model == model


def test_the_requested_model_is_stored_while_the_pod_waits() -> None:
    raw = pod("p", 1)
    raw["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "NVIDIA-L4"}
    raw["metadata"]["uid"] = "p"
    waiting = reduced(raw).wanted_model
    raw["spec"]["nodeName"] = "n"

    assert (waiting, reduced(raw).wanted_model) == ("l4", "")
