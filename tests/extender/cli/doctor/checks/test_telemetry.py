"""Checks that every GPU has telemetry."""

from dataclasses import replace
from typing import Any

import pytest

from extender.cli.doctor.checks.schedulers import _MAX_SCORE, _SHORTLIST
from extender.cli.doctor.checks.telemetry import _EXPORTER_SECONDS, _MAX_AGE_SECONDS, _QUERY_SECONDS
from extender.cli.doctor.facts import EXPORTER_WORDS, Facts
from extender.core.policy import Freshness
from extender.settings.service import ClusterSettings, Wire
from extender.settings.sources import Prometheus
from extender.sources.kubernetes.reflector import ReflectorSettings
from tests.extender.cli.doctor.things import (
    NOW,
    device,
    evidence,
    found,
    node,
    pod,
    sample,
    severities,
)

UTIL, ENGINE = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"
USED, FREE = "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"


# --- IG102 --------------------------------------------------------------------------------------


def test_series_that_name_no_node_are_reported() -> None:
    state = {"unmatched_series": 8, "unmatched_example": 'Hostname="nvidia-dcgm-x"'}
    facts = Facts(at=NOW, sources={"prometheus": state})

    assert severities("IG102", facts) == ["error"]
    assert 'prometheus: 8 series, one of them Hostname="nvidia-dcgm-x"' in evidence("IG102", facts)
    reported = (sample("idlegpu_unmatched_series", 3.0, source="prometheus"),)
    assert severities("IG102", Facts(at=NOW, metrics=reported)) == ["error"]


def test_series_that_all_name_nodes_are_well() -> None:
    assert found("IG102", Facts(at=NOW, sources={"prometheus": {"unmatched_series": 0}})) == []
    assert found("IG102", Facts(at=NOW, metrics=(sample("idlegpu_unmatched_series", 0.0),))) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("node-1", []),
        ("10.0.0.7", []),
        ("dcgm-exporter-x", []),
        ("Node-1.example.com", []),
        ("node-2", []),
        ("localhost", ["error"]),
        ("web", ["error"]),
    ],
)
def test_host_names_of_a_scrape_are_nodes_addresses_or_exporters(
    name: str, expected: list[str]
) -> None:
    facts = Facts(
        at=NOW,
        exporter=(sample(UTIL, 0.0, Hostname=name),),
        nodes=(node(), node("node-2.example.com")),
        pods=(pod("dcgm-exporter-x"), pod("web")),
    )

    assert severities("IG102", facts) == expected
    if expected:
        assert evidence("IG102", facts) == (
            f"dcgm-exporter reports {name}; nodes are node-1, node-2.example.com"
        )


# --- IG103 --------------------------------------------------------------------------------------


def aged(seconds: float, limit: float | None = None, stat: str = "median") -> Facts:
    name = "idlegpu_telemetry_age_seconds"
    settings = None if limit is None else {"freshness": {"max_age_seconds": limit}}
    metrics = (sample(name, seconds, source="prometheus", stat=stat),)
    return Facts(at=NOW, metrics=metrics, settings=settings)


def test_readings_that_are_stale_when_they_come_are_reported() -> None:
    assert severities("IG103", aged(121.0)) == ["error"]
    assert "median age 121 s, fresh up to 120 s" in evidence("IG103", aged(121.0))
    assert severities("IG103", aged(100.0, limit=60.0)) == ["error"]
    assert found("IG103", aged(121.0))[0].remedy.endswith("max_age_seconds: 242}")


def test_young_readings_and_a_single_old_one_are_well() -> None:
    assert found("IG103", aged(120.0)) == []
    assert found("IG103", aged(121.0, limit=300.0)) == []
    assert found("IG103", aged(900.0, stat="max")) == []


def collecting(milliseconds: str, *, as_option: bool = False, expected: float = 30.0) -> Facts:
    reported = (
        {"command": ["dcgm-exporter", "-c", milliseconds]}
        if as_option
        else {"env": {"DCGM_EXPORTER_INTERVAL": milliseconds}}
    )
    settings = {"prometheus": {"exporter_interval_seconds": expected}}
    return Facts(at=NOW, pods=(pod("dcgm-exporter-x", **reported),), settings=settings)


def test_an_exporter_that_collects_too_rarely_is_reported() -> None:
    assert severities("IG103", collecting("120000")) == ["error"]
    assert severities("IG103", collecting("120000", as_option=True)) == ["error"]


def test_an_exporter_with_another_interval_than_the_settings_is_reported() -> None:
    facts = collecting("10000")

    assert severities("IG103", facts) == ["warning"]
    assert "{exporter_interval_seconds: 10}" in found("IG103", facts)[0].remedy
    assert found("IG103", collecting("10000", expected=10.0)) == []
    assert found("IG103", Facts(at=NOW, pods=(pod("dcgm-exporter-x"),), settings={})) == []


def test_the_defaults_are_those_of_the_settings() -> None:
    assert Freshness().max_age_seconds == _MAX_AGE_SECONDS
    assert Prometheus().exporter_interval_seconds == _EXPORTER_SECONDS
    assert Prometheus().interval_seconds == _QUERY_SECONDS
    assert ClusterSettings().exporter_words == EXPORTER_WORDS == ReflectorSettings().exporter_words
    assert (Wire().max_score, Wire().shortlist) == (_MAX_SCORE, _SHORTLIST)


EXPORTER = pod("dcgm-exporter-x", namespace="gpu-operator")
SET = {
    "metadata": {"name": "dcgm-exporter", "namespace": "gpu-operator"},
    "spec": {"template": {"spec": {"nodeSelector": {"gpu": "yes"}}}},
    "status": {"desiredNumberScheduled": 1, "numberReady": 0},
}


def test_a_gpu_node_without_exporter_or_agent_is_reported() -> None:
    facts = Facts(at=NOW, nodes=(node(taints=[{"key": "gpu", "effect": "NoSchedule"}]),), pods=())

    assert severities("IG105", facts) == ["error"]
    assert "node-1: no pod of dcgm-exporter or idlegpu-agent" in evidence("IG105", facts)
    assert "taints of these nodes: gpu:NoSchedule" in evidence("IG105", facts)
    assert "helm install dcgm-exporter" in found("IG105", facts)[0].remedy


def test_an_exporter_that_does_not_run_is_reported_with_its_daemon_set() -> None:
    dead = pod("dcgm-exporter-x", namespace="gpu-operator", phase="Pending")
    facts = Facts(at=NOW, nodes=(node(),), pods=(dead,), daemon_sets=(SET,))

    assert "gpu-operator/dcgm-exporter-x is not ready (Pending)" in evidence("IG105", facts)
    assert "0 of 1 ready, nodeSelector {'gpu': 'yes'}" in evidence("IG105", facts)
    assert "tolerations" in found("IG105", facts)[0].remedy


def test_a_node_that_anything_measures_is_well() -> None:
    agent = pod("idlegpu-agent-x", namespace="idlegpu-agent")
    no_gpu = node("cpu", capacity={}, labels={"nvidia.com/gpu.present": None})

    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(EXPORTER,))) == []
    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(agent,))) == []
    assert found("IG105", Facts(at=NOW, nodes=(no_gpu,), pods=())) == []
    # A removed node has no telemetry, which is no fault of the exporter.
    gone = node()
    gone["status"]["conditions"][0]["status"] = "Unknown"
    assert found("IG105", Facts(at=NOW, nodes=(gone,), pods=())) == []
    # An exporter outside the cluster's pods, as on some clouds.
    assert found("IG105", Facts(at=NOW, nodes=(node(),), pods=(), devices=(device(),))) == []


def test_a_device_that_nothing_shows_measures_nothing() -> None:
    dark = device(uuid="", freshness="missing")

    assert severities("IG105", Facts(at=NOW, nodes=(node(),), pods=(), devices=(dark,)))


def unread(**changes: Any) -> Facts:
    """Return a node with a running exporter, of whose GPUs no values arrive."""
    dark = tuple(device(index, uuid="", freshness="missing") for index in range(8))
    return replace(Facts(at=NOW, nodes=(node(),), pods=(EXPORTER,), devices=dark), **changes)


def test_exporter_without_readings_is_reported() -> None:
    facts = unread()

    assert severities("IG105", facts) == ["error"]
    assert evidence("IG105", facts) == (
        "node-1: gpu-operator/dcgm-exporter-x runs, the extender has no reading of any GPU"
    )
    assert "have Prometheus scrape dcgm-exporter-x" in found("IG105", facts)[0].remedy


def test_agent_without_readings_is_reported() -> None:
    facts = unread(pods=(pod("idlegpu-agent-x", namespace="idlegpu-agent"),))

    assert "logs of idlegpu-agent-x" in found("IG105", facts)[0].remedy


def test_nodes_with_readings_or_a_young_exporter_are_not_reported() -> None:
    one = (device(0, uuid="", freshness="missing"), device(1))
    young = pod("dcgm-exporter-x")
    young["status"]["startTime"] = "2027-01-15T07:58:00Z"

    assert found("IG105", unread(devices=one)) == []
    assert found("IG105", unread(devices=(device(freshness="stale"),))) == []
    assert found("IG105", unread(devices=())) == []
    assert found("IG105", unread(pods=(young,))) == []


def test_degraded_parts_of_the_extender_are_reported() -> None:
    facts = Facts(at=NOW, degraded={"prometheus": "cannot reach http://p:9090"})

    assert severities("IG106", facts) == ["error"]
    assert "prometheus: cannot reach http://p:9090" in evidence("IG106", facts)
    assert found("IG106", Facts(at=NOW, degraded={})) == []


def test_the_objects_that_the_extender_cannot_read_are_named() -> None:
    facts = Facts(
        at=NOW,
        degraded={"apiserver/pods objects": "some objects cannot be read"},
        unreadable={"pods": ("team/a",), "nodes": ("n",)},
    )

    reported = evidence("IG106", facts)

    assert "cannot read pods team/a" in reported
    assert "cannot read nodes" not in reported


def test_a_gpu_that_telemetry_does_not_show_is_reported() -> None:
    seven = tuple(device(index) for index in range(7))
    facts = Facts(at=NOW, nodes=(node(),), devices=(*seven, device(7, uuid="")))

    assert severities("IG107", facts) == ["warning"]
    assert evidence("IG107", facts) == "node-1: has 8 GPUs, telemetry shows 7"


def test_a_gpu_that_the_node_does_not_know_is_reported() -> None:
    nine = tuple(
        sample("DCGM_FI_DEV_GPU_UTIL", 0.0, UUID=str(n), Hostname="node-1") for n in range(9)
    )

    assert severities("IG107", Facts(at=NOW, nodes=(node(),), exporter=nine)) == ["warning"]


def test_as_many_as_there_are_or_none_at_all_is_another_matter() -> None:
    eight = tuple(device(index) for index in range(8))
    shares = node(capacity={"nvidia.com/gpu.shared": "32"}, labels={"nvidia.com/gpu.replicas": "4"})
    instances = tuple(device(0, uuid=f"GPU-{n // 7}", gpu_instance_id=str(n)) for n in range(56))

    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=eight)) == []
    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=())) == []
    assert found("IG107", Facts(at=NOW, nodes=(shares,), devices=eight)) == []
    assert found("IG107", Facts(at=NOW, nodes=(node(),), devices=instances)) == []


NO_LABELS: dict[str, str | None] = dict.fromkeys(
    (
        "nvidia.com/gpu.present",
        "nvidia.com/gpu.count",
        "nvidia.com/gpu.replicas",
        "nvidia.com/gpu.sharing-strategy",
        "nvidia.com/gpu.product",
    )
)


def unlabelled(labels: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a node without the labels of gpu-feature-discovery."""
    return node(labels={**NO_LABELS, **(labels or {})}, **changes)


def shown(count: int, **changes: object) -> tuple[dict[str, object], ...]:
    return tuple(device(index, **changes) for index in range(count))


def test_without_labels_the_capacity_counts_the_gpus() -> None:
    fewer = Facts(at=NOW, nodes=(unlabelled(),), devices=shown(7))
    more = Facts(at=NOW, nodes=(unlabelled(),), devices=shown(9))

    assert severities("IG107", fewer) == ["warning"]
    assert evidence("IG107", fewer) == "node-1: capacity nvidia.com/gpu is 8, telemetry shows 7"
    assert severities("IG107", more) == ["warning"]
    assert found("IG107", Facts(at=NOW, nodes=(unlabelled(),), devices=shown(8))) == []


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(unlabelled(capacity={"nvidia.com/gpu": "28"}), id="replicas-of-each"),
        pytest.param(unlabelled(capacity={"nvidia.com/gpu.shared": "16"}), id="renamed-shares"),
        pytest.param(
            unlabelled(capacity={"nvidia.com/gpu": "4", "nvidia.com/mig-1g.5gb": "21"}), id="mig"
        ),
        pytest.param(unlabelled({"nvidia.com/gpu.replicas": "2"}), id="replicas"),
        pytest.param(unlabelled({"nvidia.com/gpu.sharing-strategy": "mps"}), id="mps"),
        pytest.param(unlabelled({"nvidia.com/gpu.product": "A100-MIG-1g.5gb"}), id="mig-single"),
        pytest.param(
            unlabelled({"cloud.google.com/gke-max-shared-clients-per-gpu": "2"}), id="gke"
        ),
    ],
)
def test_a_capacity_of_shares_or_instances_does_not_count_whole_gpus(parts: dict[str, Any]) -> None:
    assert found("IG107", Facts(at=NOW, nodes=(parts,), devices=shown(7))) == []


def test_capacity_explained_by_shares_or_instances_is_not_reported() -> None:
    instances = shown(7, gpu_instance_id="1")
    exported = tuple(
        sample("DCGM_FI_DEV_GPU_TEMP", 40.0, UUID=str(n), Hostname="node-1", GPU_I_ID="1")
        for n in range(7)
    )
    slices = {"sharing": {"timeSlicing": {"resources": [{"name": "nvidia.com/gpu"}]}}}
    nodes = (unlabelled(),)

    assert found("IG107", Facts(at=NOW, nodes=nodes, devices=instances)) == []
    assert found("IG107", Facts(at=NOW, nodes=nodes, exporter=exported)) == []
    sharing = Facts(at=NOW, nodes=nodes, devices=shown(7), plugin_configs={"default": slices})
    assert found("IG107", sharing) == []


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milliseconds", "expected"), [("110000", ["warning"]), ("110001", ["error"]), ("30000", [])]
)
def test_an_interval_with_the_queries_own_must_be_within_the_limit(
    milliseconds: str, expected: list[str]
) -> None:
    assert severities("IG103", collecting(milliseconds)) == expected


def test_an_option_counts_before_the_variable_and_unknown_values_not_at_all() -> None:
    both = pod(
        "dcgm-exporter-x",
        command=["dcgm-exporter", "--collect-interval=30000"],
        env={"DCGM_EXPORTER_INTERVAL": "120000"},
    )
    odd = pod("dcgm-exporter-y", env={"DCGM_EXPORTER_INTERVAL": "often"})

    assert found("IG103", Facts(at=NOW, pods=(both, odd), settings={})) == []


def test_hidden_examples_and_series_of_each_source_are_described() -> None:
    hidden = Facts(at=NOW, sources={"prometheus": {"unmatched_series": 3}})
    metrics = (
        sample("idlegpu_unmatched_series", 3.0, source="prometheus"),
        sample("idlegpu_unmatched_series", 0.0, source="agent"),
    )

    assert evidence("IG102", hidden) == "prometheus: 3 series, one of them not shown to this caller"
    assert evidence("IG102", Facts(at=NOW, metrics=metrics)) == "prometheus: 3 series"
    assert found("IG102", Facts(at=NOW, sources={}, metrics=metrics)) == []


def test_an_old_reading_measures_nothing_and_each_taint_is_named() -> None:
    taints = [
        {"key": key, "effect": effect}
        for key, effect in (("a", "NoSchedule"), ("b", "NoExecute"), ("c", "PreferNoSchedule"))
    ]
    old = device(freshness="stale")
    facts = Facts(at=NOW, nodes=(node(taints=taints),), pods=(), devices=(old,))

    assert severities("IG105", facts) == ["error"]
    assert "taints of these nodes: a:NoSchedule, b:NoExecute" in evidence("IG105", facts)
    empty = {**SET, "spec": {}, "status": {}}
    assert "0 of 0 ready, nodeSelector none" in evidence(
        "IG105", replace(facts, daemon_sets=(empty,))
    )


def test_an_exporter_counts_as_silent_after_five_minutes() -> None:
    exporter = pod("dcgm-exporter-x")
    exporter["status"]["startTime"] = "2027-01-15T07:55:00Z"

    assert severities("IG105", unread(pods=(exporter,))) == ["error"]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("settings", "kubectl -n idlegpu edit configmap"),
        ("telemetry", "kubectl -n idlegpu edit configmap"),
        ("apiserver/nodes", "kubectl -n idlegpu logs deploy/idlegpu-extender"),
    ],
)
def test_the_remedy_for_a_degraded_part_is_where_its_cause_is(name: str, remedy: str) -> None:
    (finding,) = found("IG106", Facts(at=NOW, degraded={name: "broken"}))

    assert finding.remedy.startswith(remedy)
    assert "prometheus.url" not in finding.remedy


@pytest.mark.parametrize("labels", [{}, NO_LABELS], ids=["labels", "capacity"])
@pytest.mark.parametrize(
    ("count", "remedy"),
    [
        (7, "a GPU that is lost takes a reboot: kubectl drain --ignore-daemonsets node-1"),
        (9, "GPUs that the node does not offer: restart its device plugin"),
    ],
)
def test_the_remedy_for_a_wrong_number_depends_on_what_is_missing(
    labels: dict[str, str | None], count: int, remedy: str
) -> None:
    facts = Facts(at=NOW, nodes=(node(labels=labels),), devices=shown(count))

    assert found("IG107", facts)[0].remedy == f"idlegpu smoke node-1 (nvidia-smi there); {remedy}"


def test_a_card_of_an_exporter_counts_by_either_label_and_a_stale_one_does_not() -> None:
    seven = tuple(
        sample("dcgm_gpu_utilization", 0.0, uuid=str(n), hostname="node-1") for n in range(7)
    )
    stale = (*shown(7), device(7, freshness="stale"))

    assert evidence("IG107", Facts(at=NOW, nodes=(node(),), exporter=seven)).endswith("shows 7")
    assert evidence("IG107", Facts(at=NOW, nodes=(node(),), devices=stale)).endswith("shows 7")


def test_instances_of_strategy_single_are_not_counted_as_cards() -> None:
    labels = {
        "nvidia.com/mig.strategy": "single",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
    }
    mixed = {"nvidia.com/mig.strategy": "mixed"}

    assert found("IG107", Facts(at=NOW, nodes=(node(labels=labels),), devices=shown(7))) == []
    assert found("IG107", Facts(at=NOW, nodes=(node(labels=mixed),), devices=shown(7)))
